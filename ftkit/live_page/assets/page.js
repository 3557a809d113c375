// The live page: asks for numbers again and again and draws them. Text goes into the page as text;
// what is HTML was escaped by the server, and the page may run no script but this file.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const COLORS = 10;
const EVERY_MS = Number(document.body.dataset.intervalMs);
const main = document.getElementById("main");
const shown = new Map(); // key of a card -> [card, its content as text]
let hovered = null; // title of the chart under the pointer

history.replaceState(null, "", "/" + location.hash); // the token is in a cookie from here on

function make(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  found.append(...children);
  return found;
}

function draw(parent, tag, attributes, text) {
  const found = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  if (text !== undefined) found.textContent = text;
  parent.append(found);
  return found;
}

function color(i) {
  return `var(--c${i % COLORS})`;
}

function shownNumber(value) {
  const size = Math.abs(value);
  if (value !== 0 && (size < 0.00005 || size >= 1e9)) return value.toExponential(2);
  const digits = size >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 };
  return value.toLocaleString("en-US", digits);
}

function ticks(low, high, most) {
  const raw = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step || 0); // no -0
  return found;
}

// A chart as wide as its card: axes with units, a line for each series, values under the pointer.
function chart(card, { title, unit, x, least, most, series }) {
  const head = make("div", { class: "head" }, make("h2", {}, title), make("span", {}, unit));
  const picture = document.createElementNS(SVG, "svg");
  const legend = make("ul", { class: "legend" });
  card.replaceChildren(head, picture, legend);
  const points = series.flatMap((one) => one.points);
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  let [left, right] = [Math.min(...xs), Math.max(...xs)];
  let [low, high] = [Math.min(...ys), Math.max(...ys)];
  if (left === right) [left, right] = [left - 0.5, right + 0.5];
  const room = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
  low = least ?? (low >= 0 ? Math.max(0, low - room) : low - room);
  high = most ?? high + room;
  const width = Math.max(card.clientWidth - 32, 200), height = 200;
  const yTicks = ticks(low, high, 5), labels = yTicks.map(shownNumber);
  const edge = { left: 12 + 7 * Math.max(...labels.map((l) => l.length)), right: 12, top: 8, bottom: 34 };
  const toX = (v) => edge.left + ((v - left) / (right - left)) * (width - edge.left - edge.right);
  const toY = (v) => height - edge.bottom - ((v - low) / (high - low)) * (height - edge.top - edge.bottom);
  const ends = series.map((one) => {
    const values = one.points.map((p) => p[1]);
    return `${one.name} from ${shownNumber(values[0])} to ${shownNumber(values.at(-1))} ${unit}`;
  });
  const label = `${title} by ${x}: ${ends.join("; ")}`;
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  picture.setAttribute("height", height);
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", label);
  yTicks.forEach((value, i) => {
    const y = toY(value);
    draw(picture, "line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: y, y2: y });
    draw(picture, "text", { x: edge.left - 6, y: y + 4, "text-anchor": "end" }, labels[i]);
  });
  const across = ticks(left, right, Math.max(2, Math.floor(width / 90)));
  for (const value of across.filter((v) => x !== "step" || Number.isInteger(v))) {
    draw(picture, "text", { x: toX(value), y: height - edge.bottom + 16, "text-anchor": "middle" }, shownNumber(value));
  }
  const middle = (edge.left + width - edge.right) / 2;
  draw(picture, "text", { x: middle, y: height - 3, "text-anchor": "middle" }, x);
  series.forEach((one, i) => {
    const line = one.points.map((p) => `${toX(p[0]).toFixed(1)},${toY(p[1]).toFixed(1)}`).join(" ");
    draw(picture, "polyline", { class: "curve", points: line, stroke: color(i) });
    if (one.points.length <= 30) {
      for (const p of one.points) draw(picture, "circle", { cx: toX(p[0]), cy: toY(p[1]), r: 2.5, fill: color(i) });
    }
  });
  const cursor = draw(picture, "line", { class: "cursor", y1: edge.top, y2: height - edge.bottom, visibility: "hidden" });

  // Values of the newest points, or of those nearest to the pointer.
  function say(at) {
    const items = series.map((one, i) => {
      const near = at === null
        ? one.points.at(-1)
        : one.points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
      const text = `${one.name} ${shownNumber(near[1])} ${unit.startsWith("nats") ? "" : unit}`;
      const place = x === "step" ? `step ${shownNumber(Math.round(near[0]))}` : `${near[0].toFixed(1)} ${x}`;
      const item = make("li", {}, `${text.trim()} (${place})`);
      item.style.setProperty("--own", color(i));
      return item;
    });
    legend.replaceChildren(...items);
    cursor.setAttribute("visibility", at === null ? "hidden" : "visible");
    if (at !== null) { cursor.setAttribute("x1", toX(at)); cursor.setAttribute("x2", toX(at)); }
  }

  picture.addEventListener("pointermove", (event) => {
    hovered = title;
    const box = picture.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * width - edge.left) / (width - edge.left - edge.right);
    say(left + Math.min(1, Math.max(0, share)) * (right - left));
  });
  picture.addEventListener("pointerleave", () => { hovered = null; say(null); });
  say(null);
}

function memory(card, { parts, limit }) {
  const total = parts.reduce((sum, part) => sum + part.bytes, 0);
  const bar = make("div", { class: "memory", role: "img" });
  bar.setAttribute("aria-label", parts.map((part) => `${part.name} ${part.text}`).join(", "));
  const legend = make("ul", { class: "legend" });
  parts.forEach((part, i) => {
    const piece = make("div", { title: `${part.name} ${part.text}` });
    piece.style.setProperty("--own", color(i));
    piece.style.width = `${(100 * part.bytes) / total}%`;
    bar.append(piece);
    const item = make("li", {}, `${part.name} ${part.text}`);
    item.style.setProperty("--own", color(i));
    legend.append(item);
  });
  const head = make("div", { class: "head" }, make("h2", {}, "Memory at its peak, by what it was"));
  if (limit) head.append(make("span", {}, `of ${limit}`));
  card.replaceChildren(head, bar, legend);
}

function html(card, { title, content }) {
  const body = make("div");
  body.innerHTML = content;
  card.replaceChildren(...(title ? [make("h2", {}, title)] : []), body);
}

function words(card, { text }) {
  card.replaceChildren(make("p", {}, text));
}

// Show these cards and no others; one that has not changed stays as it is.
function show(cards) {
  const kept = new Set(cards.map((card) => card.key));
  for (const [key, [card]] of shown) {
    if (!kept.has(key)) { card.remove(); shown.delete(key); }
  }
  main.querySelector("noscript")?.remove();
  cards.forEach(({ key, kind, fill, content }, place) => {
    const text = JSON.stringify(content);
    let [card, before] = shown.get(key) ?? [make("section", { class: kind }), null];
    if (main.children[place] !== card) main.insertBefore(card, main.children[place] ?? null);
    if (before !== text && (before === null || hovered === null || hovered !== content.title)) {
      fill(card, content);
      before = text;
    }
    shown.set(key, [card, before]);
  });
}

function chosen(runs) {
  if (runs.length === 1) return runs[0].name;
  const asked = decodeURIComponent(location.hash.slice(1));
  return runs.some((run) => run.name === asked) ? asked : null;
}

function navigation(runs, name) {
  const links = runs.length < 2 ? [] : [["all runs", "#", name === null, ""]].concat(
    runs.map((run) => [run.name, `#${encodeURIComponent(run.name)}`, run.name === name,
      [run.state, `step ${run.steps.toLocaleString("en-US")}`, run.loss && `loss ${run.loss}`].filter(Boolean).join(", ")]));
  document.getElementById("runs").replaceChildren(...links.map(([text, href, current, more]) => {
    const link = make("a", { href }, text);
    if (current) link.setAttribute("aria-current", "page");
    if (more) link.append(make("small", {}, more));
    return link;
  }));
}

async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function runCards(run) {
  const cards = [{ key: "sight", kind: "wide", fill: html, content: { title: "", content: run.sight } }];
  for (const one of run.charts) {
    cards.push({ key: `chart ${one.title}`, kind: one.title === "Loss" ? "wide" : "", fill: chart, content: one });
  }
  if (run.memory.length) {
    const content = { parts: run.memory, limit: run.memory_limit };
    cards.push({ key: "memory", kind: "wide", fill: memory, content });
  }
  if (run.checkpoints) {
    cards.push({ key: "checkpoints", kind: "wide", fill: html, content: { title: "Checkpoints", content: run.checkpoints } });
  }
  if (run.report) {
    cards.push({ key: "report", kind: "wide", fill: html, content: { title: "Report", content: run.report } });
  }
  return cards;
}

function allCards(found) {
  const losses = found.losses.filter((one) => one.points.length);
  const cards = [];
  if (losses.length) {
    const content = { title: "Training loss", unit: "nats per label token", x: "step", series: losses };
    cards.push({ key: "losses", kind: "wide", fill: chart, content });
  }
  if (found.comparison) {
    cards.push({ key: "comparison", kind: "wide comparison", fill: html, content: { title: "Comparison", content: found.comparison } });
  }
  if (!found.runs.length && !found.left_out.length) {
    const text = `There is no run in ${document.querySelector("h1").textContent} yet. Runs are shown here as they begin.`;
    cards.push({ key: "empty", kind: "wide", fill: words, content: { text } });
  }
  return cards;
}

let showing = undefined;

async function look() {
  const connection = document.getElementById("connection");
  try {
    const found = await ask("runs.json");
    const name = chosen(found.runs);
    const cards = name === null ? allCards(found) : runCards(await ask(`run.json?run=${encodeURIComponent(name)}`));
    if (name !== showing) { show([]); showing = name; }
    for (const text of found.left_out) cards.push({ key: `left out ${text}`, kind: "wide", fill: words, content: { text } });
    navigation(found.runs, name);
    show(cards);
    connection.textContent = `looked at ${new Date().toLocaleTimeString()}`;
    connection.className = "";
    document.body.dataset.ready = "true";
  } catch (error) {
    connection.textContent = `ftkit watch does not answer (${error.message.trim()})`;
    connection.className = "gone";
  }
}

function redraw() {
  for (const [key, [card]] of shown) shown.set(key, [card, null]);
  look();
}

let patience = null;
let width = main.clientWidth;
new ResizeObserver(() => {
  if (main.clientWidth === width) return;
  width = main.clientWidth;
  clearTimeout(patience);
  patience = setTimeout(redraw, 150);
}).observe(main);
addEventListener("hashchange", look);

async function lookAgainAndAgain() {
  await look();
  setTimeout(lookAgainAndAgain, EVERY_MS);
}

lookAgainAndAgain();
