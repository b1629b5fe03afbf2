'use strict';
// The state of the page, its URL, the reading of chunks, and the search. list.js draws what can be chosen, responses.js what is.

const KINDS = ['x1', 'x2', 'x3', 'replay', 'discarded', 'left_out'];
const KEPT = 4;  // chunks held in memory
const DEADLINE = 30000;  // milliseconds for a chunk to arrive
const byId = name => document.getElementById(name);

let data;  // the index: data.columns.step[g] is the step of group g
let state;  // from, to: steps; uses: names, empty for all; low, high: percent; text; colour: none, logp or ratio
let chosen = -1;  // the group that is shown
let shown = [];  // the groups that pass the filters, in the list's order
let steps = [];  // ascending
let found = null;  // the groups that hold the text, null without a text
let searchNumber = 0;  // whoever searches with another number stops
let searching = false;

// ---- chunks ----

const kept = new Map();  // chunk number -> its parts, the oldest first
const coming = new Map();  // chunk number -> {promise, arrive, fail}

function chunk(build, number, parts) {  // every chunk calls this
  const waiting = coming.get(number);
  if (!waiting) return;
  if (build !== data.build) waiting.fail(new Error('the viewer was written anew; reload the page'));
  else waiting.arrive(parts);
}

function readChunk(number) {
  if (kept.has(number)) return Promise.resolve(kept.get(number));
  if (coming.has(number)) return coming.get(number).promise;
  const waiting = {}, script = document.createElement('script');
  waiting.promise = new Promise((arrive, fail) => {
    waiting.arrive = arrive;
    waiting.fail = fail;
    script.onload = script.onerror = () => fail(new Error(`chunks/${number}.js cannot be read; reload the page`));
    setTimeout(() => fail(new Error(`chunks/${number}.js did not arrive within ${DEADLINE / 1000} seconds`)), DEADLINE);
  }).then(parts => {
    kept.set(number, parts);
    while (kept.size > KEPT) kept.delete(kept.keys().next().value);
    return parts;
  }).finally(() => {
    coming.delete(number);
    script.remove();
  });
  coming.set(number, waiting);
  script.src = `chunks/${number}.js`;
  document.head.append(script);
  return waiting.promise;
}

async function readGroup(g) {
  const parts = [];
  for (let number = data.columns.first[g]; number <= data.columns.last[g]; number++) {
    for (const [group, place, part] of await readChunk(number)) if (group === g) parts[place + 1] = part;
  }
  return parts;
}

// ---- the state and its place in the URL ----

function initialState() {
  const last = steps[steps.length - 1];
  return { from: last, to: last, uses: [], low: 0, high: 100, text: '', colour: data.coloured ? 'logp' : 'none' };
}

function number(text, otherwise) {
  const x = parseFloat(text);
  return Number.isFinite(x) ? x : otherwise;
}

function readHash() {
  const given = new URLSearchParams(location.hash.slice(1)), c = data.columns;
  state = initialState();
  const range = (given.get('steps') || '').split('-');
  state.from = number(range[0], state.from);
  state.to = number(range[1], range[0] ? state.from : state.to);
  const share = (given.get('accuracy') || '').split('-');
  state.low = number(share[0], 0);
  state.high = number(share[1], 100);
  state.uses = (given.get('source') || '').split(' ').filter(use => c.use.includes(use));
  state.text = given.get('text') || '';
  if (['none', 'logp', 'ratio'].includes(given.get('colour'))) state.colour = given.get('colour');
  const [step, row] = (given.get('group') || '').split('.').map(Number);
  return c.step.findIndex((s, g) => s === step && c.row[g] === row);
}

function writeHash() {
  const c = data.columns, said = new URLSearchParams({ steps: `${state.from}-${state.to}` });
  if (chosen >= 0) said.set('group', `${c.step[chosen]}.${c.row[chosen]}`);
  if (state.uses.length) said.set('source', state.uses.join(' '));
  if (state.low > 0 || state.high < 100) said.set('accuracy', `${state.low}-${state.high}`);
  if (state.text) said.set('text', state.text);
  said.set('colour', state.colour);
  const hash = '#' + said;
  if (hash !== location.hash) location.replace(hash);
  writeHash.written = location.hash;
}

// ---- filters ----

function passes(g) {  // all filters but the steps
  const c = data.columns, share = 100 * c.correct[g] / c.G[g];
  return (!state.uses.length || state.uses.includes(c.use[g])) && share >= state.low - 1e-9 && share <= state.high + 1e-9 &&
    (!found || found.has(g));
}

function update(change) {
  const text = state.text;
  Object.assign(state, change);
  if (state.text !== text) search();
  refresh();
}

function refresh() {  // draws everything anew, at a cost that does not grow with the texts
  const c = data.columns;
  shown = [];
  for (let g = 0; g < c.step.length; g++) if (c.step[g] >= state.from && c.step[g] <= state.to && passes(g)) shown.push(g);
  if (shown.length && !shown.includes(chosen) && !(searching && chosen >= 0)) choose(shown[0]);
  drawControls();
  drawStrip();
  drawBars();
  drawList();
  writeHash();
}

function choose(g) {
  if (g === chosen) return;
  chosen = g;
  showGroup(g);
}

function move(by) {  // another prompt of the list
  if (!shown.length) return;
  const at = shown.indexOf(chosen) + by;
  choose(shown[Math.max(0, Math.min(shown.length - 1, at))]);
  drawList(true);
  writeHash();
}

function moveStep(by) {
  const at = by > 0 ? steps.findIndex(s => s > state.to) : steps.findLastIndex(s => s < state.from);
  const step = at >= 0 ? steps[at] : by > 0 ? steps[steps.length - 1] : steps[0];
  update({ from: step, to: step });
}

function allSteps() {
  update({ from: steps[0], to: steps[steps.length - 1] });
}

// ---- text ----

async function search() {
  const mine = ++searchNumber, wanted = state.text.toLowerCase(), c = data.columns;
  found = state.text ? new Set() : null;
  markFound();
  byId('progress').textContent = '';
  searching = Boolean(found);
  if (!found) return;
  const first = new Set();
  for (const g of shown) for (let n = c.first[g]; n <= c.last[g]; n++) first.add(n);
  const order = [...first, ...Array.from({ length: data.chunks }, (_, n) => n).filter(n => !first.has(n))];
  let drawn = performance.now();
  for (let i = 0; i < order.length; i++) {
    let parts;
    try {
      parts = await readChunk(order[i]);
    } catch (error) {
      searching = mine !== searchNumber;
      byId('progress').textContent = `The search stopped: ${error.message}.`;
      return;
    }
    if (mine !== searchNumber) return;
    for (const [g, , part] of parts) {
      const texts = found.has(g) ? [] : [part.prompt, part.truth, part.text, part.answer];
      if (texts.some(text => text && String(text).toLowerCase().includes(wanted))) found.add(g);
    }
    byId('progress').textContent = `Searched ${i + 1} of ${order.length} parts. Prompts with the text: ${found.size}. Esc stops.`;
    if (performance.now() - drawn > 250) {
      refresh();
      drawn = performance.now();
    }
    await new Promise(go => setTimeout(go));  // lets the page answer between two chunks
    if (mine !== searchNumber) return;
  }
  searching = false;
  refresh();
  const counts = `Prompts with the text: ${found.size}; those of the filters: ${shown.length}`;
  byId('progress').textContent = `Searched everything. ${counts}.`;
}

function stopSearch() {  // true where one was under way
  if (!searching) return false;
  searching = false;
  searchNumber++;
  refresh();
  byId('progress').textContent = byId('progress').textContent.replace('Esc stops.', 'Stopped there.');
  return true;
}

// ---- keys and start ----

function onKey(event) {
  const typing = event.target.matches('input:not([type=checkbox], [type=radio])');
  if (event.key === 'Escape') {
    byId('tip').hidden = true;
    if (typing) event.preventDefault();  // a browser would empty the field
    if (!stopSearch() && typing) event.target.blur();
    return;
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const act = {
    '[': () => moveStep(-1), ']': () => moveStep(1), a: allSteps, j: () => move(1), k: () => move(-1), c: nextColour,
    '/': () => byId('text').focus(), '?': () => { byId('help').open = !byId('help').open; },
  }[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
}

function start(index) {  // index.js calls this
  data = index;
  setTimeout(begin);  // a task of its own, after the reading of the index
}

function begin() {
  const c = data.columns;
  steps = [...new Set(c.step)].sort((a, b) => a - b);
  document.title = `Rollouts of ${data.run}`;
  byId('title').textContent = document.title;
  const responses = c.G.reduce((sum, G) => sum + G, 0);
  byId('about').textContent = `${steps.length.toLocaleString('en')} steps, ${c.step.length.toLocaleString('en')} prompts, ` +
    `${responses.toLocaleString('en')} responses`;
  const old = data.coloured ? [] : ['no colours, since the files were written by an older version, without tokens'];
  for (const note of [...old, ...data.notes]) byId('notes').append(element('p', 'warning', note));
  makeControls();
  const given = readHash();
  if (given >= 0) choose(given);
  if (state.text) search();
  refresh();
  document.addEventListener('keydown', onKey);
  addEventListener('hashchange', () => {
    if (location.hash === writeHash.written) return;
    const g = readHash();
    if (g >= 0) choose(g);
    search();
    refresh();
    showColour();
  });
}
