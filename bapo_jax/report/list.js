'use strict';
// What is chosen from: the reward histograms, the filters' fields, and the list of prompts, of which only the rows in sight exist.

const ROW = 52;  // pixels, as in rollouts.css
const NAMES = { x1: 'X1', x2: 'X2', x3: 'X3', replay: 'replay', discarded: 'discarded', left_out: 'left out' };
const MEANING = {
  x1: 'fresh, and trained on', x2: 'a hard prompt asked again', x3: 'from the replay buffer', replay: 'from the replay buffer',
  discarded: 'fresh, not trained on', left_out: 'asked again, not trained on',
};

function element(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

function badge(use) {
  const made = element('span', `badge ${KINDS.includes(use) ? use : ''}`, NAMES[use] || use);
  made.title = MEANING[use] || '';
  return made;
}

function trainedWords(g) {
  const times = data.columns.trained[g];
  return times === null ? 'times trained on: not logged' : `trained on ${times === 1 ? 'once' : `${times} times`}`;
}

// ---- histograms: rewards by step, and of the chosen steps ----

function levels() {  // the mean rewards of groups, in as many bins as a group has counts of correct responses
  const c = data.columns, known = c.reward.filter(r => r !== null);
  let low = 0, high = 1;
  for (const r of known) {
    low = Math.min(low, r);
    high = Math.max(high, r);
  }
  const bins = Math.min(16, c.G.reduce((most, G) => Math.max(most, G), 1)) + 1;
  const of = reward => Math.round((reward - low) / (high - low) * (bins - 1)), value = bin => low + bin / (bins - 1) * (high - low);
  return { low, high, bins, of, value };
}

let byStep;  // step -> {counts by bin, mean, groups}, made once

function countSteps() {
  const c = data.columns, scale = levels();
  byStep = new Map(steps.map(step => [step, { counts: new Array(scale.bins).fill(0), sum: 0, known: 0, groups: 0 }]));
  for (let g = 0; g < c.step.length; g++) {
    const of = byStep.get(c.step[g]);
    of.groups++;
    if (c.reward[g] === null) continue;
    of.counts[scale.of(c.reward[g])]++;
    of.sum += c.reward[g];
    of.known++;
  }
  return scale;
}

let scale;

function drawStrip() {
  scale ||= countSteps();
  const canvas = byId('strip'), style = getComputedStyle(canvas), colour = name => style.getPropertyValue(name);
  canvas.style.minWidth = `${Math.min(2 * steps.length, 10000)}px`;  // beyond, a canvas grows too large for a browser
  const width = canvas.clientWidth, height = canvas.clientHeight, dots = 10, dpr = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * dpr)) canvas.width = Math.round(width * dpr);
  if (canvas.height !== Math.round(height * dpr)) canvas.height = Math.round(height * dpr);
  const pen = canvas.getContext('2d');
  pen.setTransform(dpr, 0, 0, dpr, 0, 0);
  pen.clearRect(0, 0, width, height);
  const across = width / steps.length, gap = across > 8 ? 1 : 0, tall = (height - dots) / scale.bins;
  const filtered = state.uses.length || state.low > 0 || state.high < 100 || found;
  const marked = new Set();
  if (filtered) for (let g = 0; g < data.columns.step.length; g++) if (passes(g)) marked.add(data.columns.step[g]);
  pen.fillStyle = colour('--accent');
  steps.forEach((step, i) => {
    const { counts, known } = byStep.get(step);
    counts.forEach((count, bin) => {
      if (!count) return;
      pen.globalAlpha = 0.12 + 0.78 * Math.sqrt(count / known);
      pen.fillRect(i * across, (scale.bins - 1 - bin) * tall, across - gap, tall - 1);
    });
  });
  pen.globalAlpha = 1;
  pen.strokeStyle = pen.fillStyle = colour('--ink');
  pen.lineWidth = 1.5;
  pen.beginPath();
  steps.forEach((step, i) => {
    const { sum, known } = byStep.get(step), x = (i + 0.5) * across;
    const y = (scale.bins - 0.5 - (sum / known - scale.low) / (scale.high - scale.low) * (scale.bins - 1)) * tall;
    if (known) pen.lineTo(x, y);
    if (known && steps.length < 60) pen.rect(x - 1.5, y - 1.5, 3, 3);
    if (marked.has(step)) pen.fillRect(i * across + across / 2 - Math.min(3, across / 2), height - 7, Math.min(6, across), 4);
  });
  pen.stroke();
  const first = steps.findIndex(s => s >= state.from), last = steps.findLastIndex(s => s <= state.to);
  if (first >= 0 && last >= first && last - first < steps.length - 1 || steps.length === 1) {
    pen.lineWidth = 2;
    pen.strokeStyle = colour('--edge');
    pen.strokeRect(first * across + 1, 1, Math.max(2, (last - first + 1) * across - gap - 2), height - 2);
  }
  const of = state.from === state.to && byStep.get(state.from);
  canvas.setAttribute('aria-valuemax', steps.length - 1);
  canvas.setAttribute('aria-valuenow', Math.max(0, first));
  canvas.setAttribute('aria-valuetext', of ? stepWords(state.from) : chosenSteps());
  byId('strip-first').textContent = `step ${steps[0]}`;
  byId('strip-last').textContent = steps.length > 1 ? `step ${steps[steps.length - 1]}` : '';
  const dot = filtered ? '; a mark below: a prompt passes the filters' : '';
  byId('strip-scale').textContent = `rewards ${round(scale.low)} (bottom) to ${round(scale.high)} (top)${dot}`;
}

function stepWords(step) {
  const { groups, sum, known } = byStep.get(step);
  return `step ${step}: ${groups} prompts, mean reward ${known ? (sum / known).toFixed(3) : 'unknown'}`;
}

function chosenSteps() {
  return state.from === state.to ? `step ${state.from}` : `steps ${state.from} to ${state.to}`;
}

function round(x) {
  return String(Math.round(x * 1000) / 1000);
}

function drawBars() {
  const counts = new Array(scale.bins).fill(0), box = byId('bars');
  let unknown = 0, groups = 0;
  for (const step of steps) {
    if (step < state.from || step > state.to) continue;
    const of = byStep.get(step);
    of.counts.forEach((count, bin) => { counts[bin] += count; });
    groups += of.groups;
    unknown += of.groups - of.known;
  }
  const most = Math.max(1, ...counts);
  const rows = counts.map((count, bin) => {
    const bar = element('div', 'bar');
    bar.style.width = `${100 * count / most}%`;
    return [element('span', '', round(scale.value(bin))), bar, element('span', '', count)];
  });
  box.replaceChildren(...rows.reverse().flat());
  const said = counts.map((count, bin) => `${count} of ${round(scale.value(bin))}`).join(', ');
  box.setAttribute('aria-label', `Mean rewards of the prompts of ${chosenSteps()}: ${said}`);
  const rest = unknown ? `; ${unknown} unknown` : '';
  byId('bars-caption').textContent = `${groups} prompts of ${chosenSteps()} by mean reward${rest}`;
}

// ---- fields ----

function makeControls() {
  const present = new Set(data.columns.use), counts = {};
  for (const use of data.columns.use) counts[use] = (counts[use] || 0) + 1;
  for (const use of [...KINDS.filter(k => present.has(k)), ...[...present].filter(u => !KINDS.includes(u))]) {
    const label = element('label'), box = element('input');
    box.type = 'checkbox';
    box.value = use;
    label.title = MEANING[use] || '';
    label.append(box, `${NAMES[use] || use} (${counts[use].toLocaleString('en')})`);
    byId('uses').append(label);
  }
  byId('uses').addEventListener('change', () => {
    update({ uses: [...byId('uses').querySelectorAll(':checked')].map(box => box.value) });
  });
  const field = (name, otherwise) => byId(name).addEventListener('change', () => {
    update({ [name]: number(byId(name).value, otherwise()) });
  });
  field('low', () => 0);
  field('high', () => 100);
  field('from', () => steps[0]);
  field('to', () => steps[steps.length - 1]);
  let typed;
  byId('text').addEventListener('input', () => {
    clearTimeout(typed);
    byId('list').ariaBusy = 'true';
    byId('progress').textContent = '';
    typed = setTimeout(() => update({ text: byId('text').value }), 250);
  });
  byId('all').addEventListener('click', allSteps);
  byId('reset').addEventListener('click', () => update({ uses: [], low: 0, high: 100, text: '' }));
  byId('filters').addEventListener('submit', event => event.preventDefault());
  makeColours();

  const strip = byId('strip');
  const at = event => steps[Math.max(0, Math.min(steps.length - 1, Math.floor(event.offsetX / strip.clientWidth * steps.length)))];
  strip.addEventListener('click', event => update({ from: at(event), to: at(event) }));
  strip.addEventListener('pointermove', event => {
    strip.title = stepWords(at(event));
  });
  strip.addEventListener('keydown', event => {
    const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
    const end = { Home: steps[0], End: steps[steps.length - 1] }[event.key];
    if (by) moveStep(by);
    if (end !== undefined) update({ from: end, to: end });
    if (by || end !== undefined) event.preventDefault();
  });
  new ResizeObserver(drawStrip).observe(strip);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawStrip);

  const list = byId('list');
  list.addEventListener('scroll', () => drawList(), { passive: true });
  new ResizeObserver(() => drawList()).observe(list);
  list.addEventListener('click', event => {
    const row = event.target.closest('.row');
    if (row) move(Number(row.dataset.place) - shown.indexOf(chosen));
  });
  list.addEventListener('keydown', event => {
    const page = Math.max(1, Math.floor(list.clientHeight / ROW) - 1);
    const by = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity }[event.key];
    if (by) move(by);
    if (event.key === 'Enter') byId('detail-title').focus();
    if (by || event.key === 'Enter') event.preventDefault();
  });
}

function drawControls() {
  for (const box of byId('uses').querySelectorAll('input')) box.checked = state.uses.includes(box.value);
  for (const name of ['low', 'high', 'from', 'to']) byId(name).value = round(state[name]);
  if (document.activeElement !== byId('text')) byId('text').value = state.text;
}

// ---- the list ----

function drawList(follow) {
  const list = byId('list'), rows = byId('rows'), place = shown.indexOf(chosen);
  byId('prompts-title').textContent = `${shown.length.toLocaleString('en')} prompt${shown.length === 1 ? '' : 's'}`;
  list.ariaBusy = searching;
  rows.style.height = `${Math.max(1, shown.length) * ROW}px`;
  if (follow && place >= 0) {
    if (place * ROW < list.scrollTop) list.scrollTop = place * ROW;
    if ((place + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (place + 1) * ROW - list.clientHeight;
  }
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 3);
  const last = Math.min(shown.length, first + Math.ceil(list.clientHeight / ROW) + 6);
  const made = shown.slice(first, last).map((g, i) => row(g, first + i));
  rows.replaceChildren(...(shown.length ? made : [element('p', 'soft', 'No prompt passes the filters.')]));
  if (place >= first && place < last) list.setAttribute('aria-activedescendant', `row-${place}`);
  else list.removeAttribute('aria-activedescendant');
}

function row(g, place) {
  const c = data.columns, made = element('div', 'row'), top = element('div'), times = c.trained[g];
  made.id = `row-${place}`;
  made.dataset.place = place;
  made.style.top = `${place * ROW}px`;
  made.setAttribute('role', 'option');
  made.setAttribute('aria-selected', g === chosen);
  made.setAttribute('aria-setsize', shown.length);
  made.setAttribute('aria-posinset', place + 1);
  made.title = `prompt ${c.id[g]} of step ${c.step[g]}, ${NAMES[c.use[g]] || c.use[g]}; ${trainedWords(g)}`;
  const step = state.from === state.to ? '' : `step ${c.step[g]} · `;
  top.append(badge(c.use[g]), ` ${c.correct[g]}/${c.G[g]} correct${times === null ? '' : ` · trained ${times}×`}`);
  made.append(top, element('div', 'soft', `${step}#${c.id[g]} ${c.excerpt[g]}`));
  return made;
}
