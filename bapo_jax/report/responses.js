'use strict';
// The group that is shown: its prompt and its responses side by side, their tokens coloured. Tokens of one colour that follow
// each other are one element. A response's text is made in slices, the next one when the reader comes near its end. A slice is a
// block, so that the browser lays out each once; it ends with a line of the text, or within one that goes on for too long.

const SLICE = 250;  // elements made at once, or twice as many until a line ends
const SLICE_CHARACTERS = 3000;  // likewise
const SYMBOLS = { correct: '✓ correct', wrong: '✗ wrong', unparseable: '? unparseable', infra_error: '⚠ infrastructure error' };
// A token's level is the number of limits below its value; classes and words by level.
const COLOURS = {
  none: { name: 'nothing' },
  logp: {
    name: 'log-prob', limits: [Math.log(0.01), Math.log(0.1), Math.log(0.5), Math.log(0.9)], classes: ['l4', 'l3', 'l2', 'l1', ''],
    words: ['p < 0.01', '0.01 to 0.1', '0.1 to 0.5', '0.5 to 0.9', 'p ≥ 0.9'],
    about: 'probability p of the token under the policy that sampled it; p = exp(log-prob)',
  },
  ratio: {
    name: 'importance ratio', limits: [0.5, 0.8, 0.95, 1.05, 1.25, 2],
    classes: ['below3', 'below2', 'below1', '', 'above1', 'above2', 'above3'],
    words: ['< 0.5', '0.5 to 0.8', '0.8 to 0.95', '0.95 to 1.05', '1.05 to 1.25', '1.25 to 2', '≥ 2'],
    about: 'probability under the policy before the update, divided by that under the policy that sampled the token',
  },
};

const RATIOS = ': the policy before the update had sampled it, or it was not trained on';

let parts = [];  // of the chosen group: [prompt, response 0, …]
let cards = [];  // {part, body, tokens, runs, made: runs made so far, token: that of the keyboard}

const nextFrame = () => new Promise(go => (document.hidden ? setTimeout(go) : requestAnimationFrame(() => setTimeout(go))));

async function showGroup(g) {
  const c = data.columns;
  hideTip();
  byId('detail').ariaBusy = 'true';
  byId('detail-title').textContent = `Prompt ${c.id[g]}, step ${c.step[g]}: ${c.correct[g]} of ${c.G[g]} correct`;
  let read;
  try {
    read = await readGroup(g);
  } catch (error) {
    if (g !== chosen) return;
    parts = cards = [];
    byId('group').replaceChildren(element('p', 'warning', `${error.message}.`));
    byId('responses').replaceChildren();
    byId('detail').ariaBusy = 'false';
    return;
  }
  if (g !== chosen) return;
  parts = read;
  const facts = element('div', 'facts'), mean = c.reward[g] === null ? 'unknown' : round(c.reward[g]);
  facts.append(badge(c.use[g]), element('span', '', MEANING[c.use[g]] || ''), element('span', '', trainedWords(g)),
    element('span', '', `mean reward ${mean}`), element('span', '', `sampled at step ${c.sampled[g]}`));
  const texts = [element('h3', '', 'Prompt'), plain(parts[0].prompt), element('h3', '', 'Ground truth'), plain(parts[0].truth)];
  byId('group').replaceChildren(facts, ...texts);
  cards = parts.slice(1).map((part, i) => makeCard(part, i, g));
  byId('responses').replaceChildren(...cards.map(card => card.body.parentElement));
  showColour();
}

function plain(text) {
  const made = element('pre', '', text);
  made.tabIndex = 0;
  return made;
}

function makeCard(part, i, g) {
  const known = Object.hasOwn(SYMBOLS, part.verdict), card = element('article', known ? `card ${part.verdict}` : 'card');
  const facts = element('div', 'facts'), stale = data.columns.step[g] - 1 - part.version;
  facts.append(element('h3', 'verdict', known ? SYMBOLS[part.verdict] : part.verdict));
  const say = words => facts.append(element('span', '', words));
  say(`reward ${part.reward === null ? 'none' : round(part.reward)}`);
  if ('answer' in part) say(part.answer === null ? 'no answer extracted' : `answer: ${part.answer}`);
  say(part.finish === 'length' ? 'cut at the length limit' : `finish: ${part.finish}`);
  say(`policy ${part.version}, ${stale} ${stale === 1 ? 'step' : 'steps'} stale`);
  if ('cuts' in part) say(`${part.cuts ? part.cuts.split(' ').length : 0} tokens`);
  const body = element('div', 'text'), made = { part, body, runs: [], made: 0, token: -1 };
  body.tabIndex = 0;
  body.setAttribute('role', 'group');
  card.setAttribute('aria-label', body.ariaLabel = `Response ${i + 1} of ${data.columns.G[g]}`);
  body.addEventListener('scroll', () => {
    hideTip();
    if (body.scrollTop + 2 * body.clientHeight > body.scrollHeight) addSlice(made);
  }, { passive: true });
  body.addEventListener('pointermove', event => hover(made, event));
  body.addEventListener('pointerleave', hideTip);
  body.addEventListener('keydown', event => onTextKey(made, event));
  body.addEventListener('blur', hideTip);
  card.append(facts, body);
  return made;
}

// ---- tokens and colours ----

function readTokens(card) {  // starts: where each token begins in the text, and the text's length; logp, ratio: numbers or null
  if (card.tokens || !card.part.cuts) return card.tokens;
  const starts = [0], numbers = (text, unit) => text && text.split(' ').map(x => (x === '?' ? NaN : Number(x) / unit));
  for (const length of card.part.cuts.split(' ')) starts.push(starts[starts.length - 1] + Number(length));
  card.tokens = { starts, logp: numbers(card.part.logp, 1000), ratio: numbers(card.part.ratio, 1) };
  return card.tokens;
}

function level(colour, value) {
  return COLOURS[colour].limits.reduce((below, limit) => below + (value >= limit), 0);
}

function runsOf(card, colour) {  // [{start, end, name}]: the text in pieces of one class, none longer than a slice
  const tokens = readTokens(card), values = tokens && tokens[colour], length = card.part.text.length, runs = [];
  const add = (start, end, name) => {
    const last = runs[runs.length - 1];
    if (last && last.name === name && end - last.start <= SLICE_CHARACTERS) last.end = end;
    else if (end > start) runs.push({ start, end, name });
  };
  const name = x => (Number.isNaN(x) ? '' : COLOURS[colour].classes[level(colour, x)]);
  if (values) values.forEach((x, t) => add(tokens.starts[t], tokens.starts[t + 1], name(x)));
  else for (let start = 0; start < length; start += SLICE_CHARACTERS) add(start, Math.min(length, start + SLICE_CHARACTERS), '');
  return runs;
}

async function showColour() {  // makes every text anew, one a frame
  const mine = cards, colour = state.colour;
  byId('detail').ariaBusy = 'true';
  drawLegend();
  for (const card of mine) {
    if (mine !== cards || colour !== state.colour) return;
    card.runs = runsOf(card, colour);
    card.made = 0;
    card.body.replaceChildren();
    addSlice(card);
    await nextFrame();
  }
  if (mine === cards && colour === state.colour) byId('detail').ariaBusy = 'false';
}

function addSlice(card) {  // false where the text is whole
  const { runs, part, body } = card, block = element('div', 'slice');
  let size = 0, ended = false;
  while (card.made < runs.length && !ended && size < 2) {
    const run = runs[card.made], full = text => size + Math.max(1 / SLICE, text.length / SLICE_CHARACTERS);
    let text = part.text.slice(run.start, run.end);
    ended = full(text) >= 1 && text.includes('\n');
    if (ended) text = text.slice(0, text.lastIndexOf('\n') + 1);
    const node = run.name ? element('span', run.name, text) : document.createTextNode(text);
    node.start = run.start;
    block.append(node);
    size = full(text);
    if (run.start + text.length < run.end) run.start += text.length;
    else card.made++;
  }
  if (!block.firstChild) return false;
  block.start = block.firstChild.start;
  body.append(block);
  markFound();
  return true;
}

function markFound() {  // underlines the search's text where it stands within what has been made
  if (!globalThis.Highlight) return;
  const wanted = state.text.toLowerCase(), ranges = [];
  for (const { body, part } of wanted ? cards : []) {
    const text = part.text.toLowerCase();
    if (text.length !== part.text.length) continue;
    const end = madeTo(body);
    for (let at = text.indexOf(wanted); at >= 0 && at + wanted.length <= end && ranges.length < 500;) {
      ranges.push(rangeOf(body, at, at + wanted.length));
      at = text.indexOf(wanted, at + wanted.length);
    }
  }
  CSS.highlights.set('found', new Highlight(...ranges));
}

function madeTo(body) {  // how much of the text is made
  return body.lastChild ? body.lastChild.start + body.lastChild.textContent.length : 0;
}

function lastBefore(count, startOf, at) {  // the last of those, in order, that start at or before a place
  let low = 0, high = count - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (startOf(middle) <= at) low = middle;
    else high = middle - 1;
  }
  return low;
}

function placeOf(body, at) {  // the text node and offset of a place in the text that is made
  const blocks = body.childNodes, block = blocks[lastBefore(blocks.length, i => blocks[i].start, at)].childNodes;
  const node = block[lastBefore(block.length, i => block[i].start, at)];
  return [node.firstChild || node, at - node.start];
}

function rangeOf(body, start, end) {
  const range = document.createRange();
  range.setStart(...placeOf(body, start));
  range.setEnd(...placeOf(body, end));
  return range;
}

// ---- exact numbers of a token ----

function tokenAt(tokens, at) {
  return lastBefore(tokens.starts.length - 1, t => tokens.starts[t], at);
}

function tokenWords(card, t) {
  const { starts, logp, ratio } = card.tokens, piece = card.part.text.slice(starts[t], starts[t + 1]);
  const words = [`token ${t + 1} of ${starts.length - 1}: ${piece ? JSON.stringify(piece) : 'adds no text of its own'}`];
  const known = x => !Number.isNaN(x), share = x => `${x.toFixed(3)} (p = ${Math.exp(x).toPrecision(3)})`;
  if (logp) words.push(known(logp[t]) ? `log-prob ${share(logp[t])}` : 'log-prob unknown');
  if (ratio) words.push(known(ratio[t]) ? `importance ratio ${ratio[t]}` : 'importance ratio unknown');
  return words.join('\n');
}

function hover(card, event) {
  if (!readTokens(card)) return;
  const at = document.caretPositionFromPoint ? document.caretPositionFromPoint(event.clientX, event.clientY)
    : document.caretRangeFromPoint(event.clientX, event.clientY);
  const node = at && (at.offsetNode || at.startContainer);
  if (!node || node.nodeType !== Node.TEXT_NODE || !card.body.contains(node)) return hideTip();
  const offset = at.offset ?? at.startOffset, start = node.start ?? node.parentNode.start;
  const covers = i => {  // the caret stands beside the character under the pointer: before it or after it
    const range = document.createRange();
    if (i < 0 || i >= node.length) return false;
    range.setStart(node, i);
    range.setEnd(node, i + 1);
    const { clientX: x, clientY: y } = event;
    return [...range.getClientRects()].some(r => x >= r.left && x <= r.right && y >= r.top && y <= r.bottom);
  };
  const character = [offset, offset - 1].find(covers);
  if (character === undefined) return hideTip();
  showTip(tokenWords(card, tokenAt(card.tokens, start + character)), event.clientX, event.clientY + 18);
}

async function onTextKey(card, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === 'End') {
    event.preventDefault();
    while (addSlice(card)) await nextFrame();
    card.body.scrollTop = card.body.scrollHeight;
  }
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || !readTokens(card)) return;
  event.preventDefault();
  card.token = Math.max(0, Math.min(card.tokens.starts.length - 2, card.token + by));
  const [start, end] = card.tokens.starts.slice(card.token, card.token + 2);
  while (madeTo(card.body) < end && addSlice(card));
  const box = card.body.getBoundingClientRect();
  if (!card.part.text) return showTip(tokenWords(card, card.token), box.left, box.bottom);
  const range = rangeOf(card.body, start, end);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
  let at = range.getBoundingClientRect();
  if (at.bottom > box.bottom || at.top < box.top) {
    card.body.scrollTop += at.top - box.top - box.height / 2;
    await nextFrame();
    at = range.getBoundingClientRect();
  }
  showTip(tokenWords(card, card.token), at.left, at.bottom + 6);
}

function showTip(words, x, y) {
  const tip = byId('tip');
  tip.textContent = words;
  tip.hidden = false;
  tip.style.left = `${Math.max(4, Math.min(x, innerWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${y + tip.offsetHeight > innerHeight ? Math.max(0, y - tip.offsetHeight - 40) : y}px`;
}

function hideTip() {
  byId('tip').hidden = true;
}

// ---- the choice of a colouring, and its legend ----

function makeColours() {
  for (const [colour, { name }] of Object.entries(COLOURS)) {
    const label = element('label'), radio = element('input');
    Object.assign(radio, { type: 'radio', name: 'colour', value: colour });
    label.append(radio, name);
    byId('colours').append(label);
    radio.addEventListener('change', () => setColour(colour));
  }
  byId('colouring').hidden = !data.coloured;
}

function setColour(colour) {
  state.colour = colour;
  writeHash();
  showColour();
}

function nextColour() {
  const names = Object.keys(COLOURS);
  if (data.coloured) setColour(names[(names.indexOf(state.colour) + 1) % names.length]);
}

function drawLegend() {
  const { words, classes, about, name } = COLOURS[state.colour];
  for (const radio of byId('colours').querySelectorAll('input')) radio.checked = radio.value === state.colour;
  if (!words) return byId('legend').replaceChildren();
  const swatches = words.map((word, i) => element('span', classes[i], word));
  const there = parts.slice(1).some(part => part[state.colour] !== undefined);
  const said = there || !parts.length ? about : `This group has no ${name}s in its file${state.colour === 'ratio' ? RATIOS : ''}.`;
  byId('legend').replaceChildren(...swatches, element('div', '', said));
}
