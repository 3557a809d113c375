// The live page: asks for numbers again and again and draws them. Text goes into the page as text;
// what is HTML was escaped by the server, and the page may run no script but this file.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const COLORS = 10;
const TITLE = document.querySelector("h1").textContent;
const EVERY_MS = Number(document.body.dataset.intervalMs);
const main = document.getElementById("main");
const shown = new Map(); // key of a card -> [card, its content as text]
const hidden = new Set(); // title and name of curves that are not drawn
const view = { log: false, smoothing: 0, ...JSON.parse(sessionStorage.getItem("view") ?? "{}") };
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

// Powers of ten; where they are few, what lies between them, too.
function logTicks(low, high) {
  const found = (multiples) => {
    const all = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      all.push(...multiples.map((n) => n * 10 ** power));
    }
    return all.filter((value) => value >= low && value <= high);
  };
  const powers = found([1]);
  if (powers.length > 6) return powers.filter((_, i) => i % Math.ceil(powers.length / 6) === 0);
  return powers.length > 2 ? powers : found([1, 2, 5]);
}

// Exponential mean of what came before, in which the first values do not count more than others.
function smoothed(points, weight) {
  let sum = 0, weights = 0;
  return points.map(([x, y]) => {
    sum = weight * sum + (1 - weight) * y;
    weights = weight * weights + (1 - weight);
    return [x, sum / weights];
  });
}

function pathOf(points, toX, toY) {
  return points.map((p) => `${toX(p[0]).toFixed(1)},${toY(p[1]).toFixed(1)}`).join(" ");
}

// A chart as wide as its card: axes with units, a line for each series, values under the pointer.
function chart(card, content) {
  const { title, unit, x, note } = content;
  const log = content.log && view.log;
  const drawn = content.series.map((one) => {
    const points = log ? one.points.filter((p) => p[1] > 0) : one.points;
    return { ...one, points, smooth: one.noisy && view.smoothing > 0 ? smoothed(points, view.smoothing) : null };
  });
  const isShown = (one) => one.points.length > 0 && !hidden.has(`${title} ${one.name}`);
  const few = drawn.some(isShown) ? drawn.filter(isShown) : drawn.filter((one) => one.points.length);
  const thin = few.find((one) => one.points.some((p) => p.length > 2));
  const each = thin && x === "step" ? ` of ${Math.round(thin.points[1][0] - thin.points[0][0])} steps` : "";
  const pale = card.classList.contains("wide") ? ", pale: lowest to highest" : "";
  const notes = [note, unit, thin && `means${each}${pale}`].filter(Boolean).join("; ");
  const head = make("div", { class: "head" }, make("h2", {}, title), make("span", {}, notes));
  const picture = document.createElementNS(SVG, "svg");
  const legend = make("ul", { class: "legend" });
  const focused = [...card.querySelectorAll(".legend button")].indexOf(document.activeElement);
  card.replaceChildren(head, picture, legend);
  const points = few.flatMap((one) => one.points);
  const xs = points.map((p) => p[0]), ys = points.flatMap((p) => p.slice(1)).filter((y) => !log || y > 0);
  let [left, right] = [Math.min(...xs), Math.max(...xs)];
  let [low, high] = [Math.min(...ys), Math.max(...ys)];
  if (!points.length) [left, right, low, high] = [0, 1, 0.1, 1];
  if (left === right) [left, right] = [left - 0.5, right + 0.5];
  if (high - low < 1e-9 * Math.abs(high)) low = high = (low + high) / 2; // the rounding of means
  if (log) {
    [low, high] = [low / 1.1, high * 1.1];
  } else {
    const room = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
    low = content.least ?? (low >= 0 ? Math.max(0, low - room) : low - room);
    high = content.most ?? high + room;
  }
  const width = Math.max(card.clientWidth - 32, 200), height = 200;
  const yTicks = log ? logTicks(low, high) : ticks(low, high, 5), labels = yTicks.map(shownNumber);
  const edge = { left: 12 + 7 * Math.max(0, ...labels.map((l) => l.length)), right: 12, top: 8, bottom: 34 };
  const scale = log ? Math.log : (v) => v;
  const toX = (v) => edge.left + ((v - left) / (right - left)) * (width - edge.left - edge.right);
  const toY = (v) => height - edge.bottom
    - ((scale(Math.max(v, low)) - scale(low)) / (scale(high) - scale(low))) * (height - edge.top - edge.bottom);
  const ends = few.filter((one) => one.points.length).map((one) => {
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
  drawn.forEach((one, i) => {
    if (!few.includes(one)) return;
    const ranges = one.points.filter((p) => p.length > 2);
    if (ranges.length) {
      const around = [...ranges.map((p) => [p[0], p[3]]), ...[...ranges].reverse().map((p) => [p[0], p[2]])];
      draw(picture, "polygon", { class: "range", points: pathOf(around, toX, toY), fill: color(i) });
    }
    const curve = { class: one.smooth ? "raw" : "curve", points: pathOf(one.points, toX, toY), stroke: color(i) };
    draw(picture, "polyline", curve);
    if (one.smooth) {
      draw(picture, "polyline", { class: "curve", points: pathOf(one.smooth, toX, toY), stroke: color(i) });
    } else if (one.points.length <= 30) {
      for (const p of one.points) draw(picture, "circle", { cx: toX(p[0]), cy: toY(p[1]), r: 2.5, fill: color(i) });
    }
  });
  const cursor = draw(picture, "line", { class: "cursor", y1: edge.top, y2: height - edge.bottom, visibility: "hidden" });

  // A click on a name takes its curve out of the picture, or puts it back.
  const names = drawn.map((one, i) => {
    const name = make("button", { type: "button", "aria-pressed": few.includes(one) });
    name.style.setProperty("--own", color(i));
    name.addEventListener("click", () => {
      const key = `${title} ${one.name}`;
      if (!hidden.delete(key)) hidden.add(key);
      chart(card, content);
    });
    legend.append(make("li", {}, name));
    return name;
  });
  names[focused]?.focus();

  // Values of the newest points, or of those nearest to the pointer.
  function say(at) {
    drawn.forEach((one, i) => {
      if (!one.points.length) { names[i].textContent = `${one.name}: none above 0`; return; }
      const near = at === null
        ? one.points.length - 1
        : one.points.reduce((a, b, j) => (Math.abs(b[0] - at) < Math.abs(one.points[a][0] - at) ? j : a), 0);
      const [across, up] = one.points[near];
      const value = `${one.name} ${shownNumber(up)} ${unit.startsWith("nats") ? "" : unit}`.trim();
      const smooth = one.smooth ? `, smoothed ${shownNumber(one.smooth[near][1])}` : "";
      const place = x === "step" ? `step ${shownNumber(Math.round(across))}` : `${across.toFixed(1)} ${x}`;
      names[i].textContent = `${value}${smooth} (${place})`;
    });
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

// What was measured and what was predicted, as two bars of one scale and as a table.
function memory(card, { parts, limit }) {
  const columns = ["measured", "predicted"].filter((which) => parts.some((part) => part[which][0] > 0));
  const total = (which) => parts.reduce((sum, part) => sum + part[which][0], 0);
  const most = Math.max(...columns.map(total));
  const bars = columns.map((which) => {
    const nonzero = parts.filter((part) => part[which][0] > 0);
    const bar = make("div", { class: "memory", role: "img" });
    bar.setAttribute("aria-label", `${which}: ${nonzero.map((part) => `${part.name} ${part[which][1]}`).join(", ")}`);
    parts.forEach((part, i) => {
      if (!part[which][0]) return;
      const piece = make("div", { title: `${which}: ${part.name} ${part[which][1]}` });
      piece.style.setProperty("--own", color(i));
      piece.style.width = `${(100 * part[which][0]) / most}%`;
      bar.append(piece);
    });
    return make("div", { class: "bar" }, make("small", {}, which), bar);
  });
  const rows = parts.map((part, i) => {
    const name = make("th", { scope: "row", class: "swatch" }, part.name);
    name.style.setProperty("--own", color(i));
    return make("tr", {}, name, ...columns.map((which) => make("td", {}, part[which][1])));
  });
  const heads = ["", ...columns].map((text) => make("th", { scope: "col" }, text));
  const table = make("table", { class: "parts" }, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows));
  const head = make("div", { class: "head" }, make("h2", {}, "Memory at its peak, by what it was"));
  if (limit) head.append(make("span", {}, `of ${limit}`));
  card.replaceChildren(head, ...bars, table);
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
  let wanted = location.hash.slice(1);
  try { wanted = decodeURIComponent(wanted); } catch { /* it is no address of this page */ }
  return runs.some((run) => run.name === wanted) ? wanted : null;
}

function navigation(runs, name) {
  const links = runs.length < 2 ? [] : [["all runs", "#", name === null, ""]].concat(
    runs.map((run) => [run.name, `#${encodeURIComponent(run.name)}`, run.name === name,
      [run.state, `step ${run.steps.toLocaleString("en-US")}`, run.loss && `loss ${run.loss}`].filter(Boolean).join(", ")]));
  document.getElementById("runs").replaceChildren(...links.map(([text, href, current, more]) => {
    const link = make("a", { href, title: text }, make("span", {}, text));
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
  const cards = [{ key: "status", kind: "wide", fill: html, content: { title: "", content: run.status } }];
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
  if (run.example) {
    cards.push({ key: "example", kind: "wide", fill: html, content: { title: "Example", content: run.example } });
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
    const note = losses.length < found.runs.length && found.losses.length < found.runs.length
      ? `the ${found.losses.length} of ${found.runs.length} runs that began last` : "";
    // Losses of another model or objective are on another scale.
    const models = [...new Set(losses.map((one) => one.of))];
    for (const of of models) {
      const title = models.length > 1 ? `Training loss of ${of}` : "Training loss";
      const series = losses.filter((one) => one.of === of);
      const content = { title, unit: "nats per label token", x: "step", log: true, note, series };
      cards.push({ key: `losses ${of}`, kind: "wide", fill: chart, content });
    }
  }
  if (found.comparison) {
    cards.push({ key: "comparison", kind: "wide comparison", fill: html, content: { title: "Comparison", content: found.comparison } });
  }
  if (!found.runs.length && !found.left_out.length) {
    const text = `There is no run in ${TITLE} yet. Runs are shown here as they begin.`;
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
    if (name !== chosen(found.runs)) return; // another was chosen meanwhile, and is looked at
    if (name !== showing) { show([]); showing = name; }
    for (const text of found.left_out) cards.push({ key: `left out ${text}`, kind: "wide", fill: words, content: { text } });
    document.title = `${name === null ? "" : `${name} - `}${TITLE} - ftkit`;
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

function refill() {
  sessionStorage.setItem("view", JSON.stringify(view));
  redraw();
}
const logBox = document.getElementById("log"), smoothing = document.getElementById("smoothing");
logBox.checked = view.log;
smoothing.value = view.smoothing;
logBox.addEventListener("change", () => { view.log = logBox.checked; refill(); });
smoothing.addEventListener("input", () => { view.smoothing = Number(smoothing.value); refill(); });

// A look at runs of very many steps takes the server a while; it is to have rest in between.
async function lookAgainAndAgain() {
  const began = performance.now();
  if (!document.hidden) await look();
  setTimeout(lookAgainAndAgain, Math.max(EVERY_MS, 5 * (performance.now() - began)));
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });

lookAgainAndAgain();
