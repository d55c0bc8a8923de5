// The charts of a run, drawn by uPlot from the JSON of each figure. All charts share the x axis, the zoom, the cursor and the smoothing.
const tone = name => getComputedStyle(root).getPropertyValue(name).trim();
const runs = JSON.parse(document.getElementById("runs")?.textContent ?? "[]");  // {step, tokens, time, ...} of each run, for the x axis
const kept = "colonnade " + location.pathname;
const tools = {axis: "step", smooth: 0, zoom: null, log: {}, ...stored()};
const charts = [...document.querySelectorAll(".chart")].filter(figure => figure.querySelector(".plot")).map((figure, at) => {
  const spec = JSON.parse(figure.querySelector("script").textContent);
  return {figure, spec, at, box: figure.querySelector(".plot"), hidden: new Set(), log: tools.log[at] ?? spec.log ?? false, plot: null};
});
let pointed = null;  // the chart under the pointer

// A page that reloads during the run (`--follow`) keeps the zoom and the other choices.
function stored() {
  try { return JSON.parse(sessionStorage.getItem(kept) ?? "{}"); } catch { return {}; }
}
function store() {
  try { sessionStorage.setItem(kept, JSON.stringify(tools)); } catch { /* a file without storage */ }
}

// -- numbers ------------------------------------------------------------------------------------------------------
const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const compact = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 4});
const plain = new Intl.NumberFormat("en", {maximumSignificantDigits: 5});

function number(value) {
  return value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential(2) : plain.format(value);
}

// A label of an axis: 20k and not 20,000, if all labels are multiples of a tenth of the unit.
function label(value, step) {
  if (value === null || value === undefined) return "";
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(Math.max(0, Math.floor(Math.log10(Math.abs(value))) - Math.floor(Math.log10(step))));
  const [unit, name] = UNITS.find(([unit]) => Math.abs(value) >= unit && step >= unit / 10) ?? [1, ""];
  return plain.format(value / unit) + name;
}

function duration(seconds) {
  const [hours, minutes, rest] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
  if (seconds < 60) return `${plain.format(+rest.toPrecision(3))} s`;
  return hours ? `${hours}:${String(minutes).padStart(2, "0")} h` : `${minutes}:${String(Math.floor(rest)).padStart(2, "0")} min`;
}

const xText = value => tools.axis === "time" ? duration(value) : `${tools.axis} ${plain.format(Math.round(value))}`;

// -- data ---------------------------------------------------------------------------------------------------------
// A step as a position on the chosen axis: interpolated in the table of its run.
function place(step, run) {
  const from = runs[run]?.step, to = runs[run]?.[tools.axis];
  if (tools.axis === "step" || !to) return step;
  let low = 0, high = from.length - 1;
  while (high - low > 1) { const middle = low + high >> 1; if (from[middle] <= step) low = middle; else high = middle; }
  return to[low] + Math.min(Math.max((step - from[low]) / (from[high] - from[low] || 1), 0), 1) * (to[high] - to[low]);
}

// An exponential moving average without the bias of its start.
function smoothed(values) {
  let sum = 0, weight = 0;
  return values.map(value => {
    sum = tools.smooth * sum + (1 - tools.smooth) * value;
    weight = tools.smooth * weight + 1 - tools.smooth;
    return sum / weight;
  });
}

const xsOf = (chart, one) => chart.spec.grids[one.grid].map(step => place(step, one.run));
const ends = xs => xs.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);
let whole = [0, 1];  // of all charts, so that they lie below each other
function measure() {
  whole = ends(charts.flatMap(chart => chart.spec.series.filter(one => one.kind !== "level").flatMap(one => ends(xsOf(chart, one)))));
  if (!(whole[1] > whole[0])) whole = [whole[0] - 0.5, whole[0] + 0.5];
}

// Lines of uPlot: {xs, ys} with options, and `told`, the values that the cursor shows. In stacked charts, the upper areas come first, so
// that the lower ones are drawn over them.
function lines(chart) {
  const made = [], bands = [], shown = chart.spec.series.map((one, at) => [one, at]).filter(([, at]) => !chart.hidden.has(at));
  const positive = values => chart.log ? values.map(value => value > 0 ? value : null) : values;
  const below = [];
  for (const [one, at] of shown) {
    const color = tone(`--c${one.color}`), xs = one.kind === "level" ? whole : xsOf(chart, one);
    const ys = positive(one.kind === "level" ? [one.y[0], one.y[0]] : one.y), line = {at, xs, told: one.y, name: one.name};
    if (chart.spec.stacked) {
      const top = ys.map((value, each) => value + (below[each] ?? 0));
      below.splice(0, below.length, ...top);
      made.unshift({...line, ys: top, told: ys, stroke: tone("--card"), width: 0.5, fill: color});
      continue;
    }
    if (one.low) {
      const least = Math.min(...one.y.filter(value => value > 0));
      const low = chart.log ? one.low.map(value => value > 0 ? value : least) : one.low;
      bands.push({series: [made.length + 1, made.length + 2], fill: color + "33"});
      made.push({at, xs, ys: positive(one.high), silent: true, color}, {at, xs, ys: low, silent: true});
    }
    const smooth = chart.spec.smooth && tools.smooth > 0 && one.kind === "line";
    if (smooth) made.push({at, xs, ys, silent: true, stroke: color + "55", width: 1});
    const marks = one.kind === "dots" || one.kind === "curve";
    const style = {stroke: color, width: one.kind === "dots" ? 0 : 1.8, dash: one.kind === "level" ? [6, 4] : undefined};
    made.push({...line, ...style, ys: smooth ? positive(smoothed(one.y)) : ys, marks, range: one.low && [one.low, one.high], level: one.kind === "level"});
  }
  return [made, bands];
}

// -- drawing ------------------------------------------------------------------------------------------------------
function draw(chart) {
  const [made, bands] = lines(chart), spec = chart.spec, ink = tone("--ink-2"), faint = tone("--line");
  chart.plot?.destroy();
  chart.box.querySelector(".u-wrap")?.remove();
  const data = made.length ? uPlot.join(made.map(each => [each.xs, each.ys])) : [whole];
  const axis = {stroke: ink, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 18, grid: {stroke: faint, width: 1}, ticks: {show: false}};
  const width = chart.box.clientWidth, narrow = width < 420;
  const seconds = [0.01, 0.1, 1, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800];
  const across = {...axis, grid: {show: false}, label: tools.axis, size: 30, space: narrow ? 62 : 76,
    values: (_, splits, __, ___, step) => splits.map(value => tools.axis === "time" ? duration(value) : value % 1 ? "" : label(value, step))};
  if (tools.axis === "time") across.incrs = seconds;
  // As wide as the longest label.
  const size = (_, values) => Math.max(36, 12 + 7 * Math.max(0, ...(values ?? []).map(value => value.length)));
  const up = {...axis, scale: "y", label: spec.y, size, values: (_, splits, __, ___, step) => splits.map(value => label(value, chart.log ? Math.abs(value) : step))};
  const axes = [across, up];
  if (spec.second) {
    const [name, factor] = spec.second;
    const round = (_, __, low, high) => {
      const rough = (high - low) * factor / 6, power = 10 ** Math.floor(Math.log10(rough)), step = power * [1, 2, 5, 10].find(each => each * power >= rough);
      return Array.from({length: Math.floor(high * factor / step) + 1}, (_, at) => at * step / factor);
    };
    axes.push({...up, side: 1, label: name, grid: {show: false}, splits: round, values: (_, splits) => splits.map(value => plain.format(+(value * factor).toPrecision(4)))});
  }
  const options = {
    width, height: narrow ? 220 : 260, axes, bands, legend: {show: false}, padding: [10, spec.second ? 0 : 14, 0, 0],
    scales: {
      x: {time: false, range: () => tools.zoom ?? whole},
      y: {distr: chart.log ? 3 : 1, ...(spec.zero && !chart.log ? {range: (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.06 : 1]} : {})},
    },
    series: [{}, ...made.map(each => ({
      stroke: each.stroke ?? "transparent", width: each.width ?? 0, fill: each.fill, dash: each.dash,
      paths: each.width === 0 ? () => null : undefined,
      points: {show: !!each.marks, size: each.width === 0 ? 5 : 7, width: each.width === 0 ? 0 : 1, stroke: tone("--card"), fill: each.stroke},
    }))],
    cursor: {
      y: false, drag: {x: true, y: false, setScale: false, dist: 6}, focus: {prox: -1},
      sync: {key: "runs", scales: ["x", null], setSeries: false, filters: {pub: type => type === "mousemove" || type === "mouseleave"}},
      points: {show: (_, at) => !made[at - 1].silent && !made[at - 1].level, size: 8},
      bind: {dblclick: () => () => { zoom(null); }},
      // The nearest point of each line: the lines have different steps.
      dataIdx: (plot, at, found) => {
        const values = plot.data[at];
        for (let far = 0; at && far < values.length; far++) {
          if (values[found - far] != null) return found - far;
          if (values[found + far] != null) return found + far;
        }
        return found;
      },
    },
    hooks: {
      setSelect: [plot => {
        if (plot.select.width < 6) return;
        const [from, to] = [plot.select.left, plot.select.left + plot.select.width].map(x => plot.posToVal(x, "x"));
        plot.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
        zoom([from, to]);
      }],
      setCursor: [plot => { if (pointed === chart) tell(chart, made, plot); }],
    },
  };
  // A band is filled from the path of its upper line, which is built only for a line with a stroke.
  made.forEach((each, at) => { if (each.silent && !each.stroke) options.series[at + 1].width = 0.01; });
  chart.plot = new uPlot(options, data, chart.box);
  chart.made = made;
  // A finger moves the cursor; up and down still scroll the page.
  const over = chart.plot.over;
  over.addEventListener("pointerenter", () => { pointed = chart; });
  over.addEventListener("pointerleave", () => { pointed = null; showHint(""); });
  over.addEventListener("touchmove", event => {
    const box = over.getBoundingClientRect(), touch = event.touches[0];
    pointed = chart;
    chart.touch = [touch.clientX, touch.clientY];
    for (const each of charts) each.plot.setCursor({left: (touch.clientX - box.left) / box.width * each.plot.over.clientWidth, top: each === chart ? touch.clientY - box.top : 20});
  }, {passive: true});
  over.addEventListener("touchend", () => { pointed = null; showHint(""); });
}

// The values under the cursor, in the order of the legend.
function tell(chart, made, plot) {
  const {left, top, idx, idxs} = plot.cursor;
  if (left < 0 || idx == null) { showHint(""); return; }
  const told = [];
  made.forEach((each, at) => {
    if (each.silent || each.level) return;
    const x = plot.data[0][idxs[at + 1]], own = each.xs.indexOf(x), value = each.told[own];
    if (value == null || (each.marks && Math.abs(plot.valToPos(x, "x") - left) > 12)) return;
    const [low, high] = each.range ? [each.range[0][own], each.range[1][own]] : [value, value];
    const shown = chart.spec.smooth && tools.smooth > 0 ? plot.data[at + 1][idxs[at + 1]] : value;
    told.push([each.at, `${each.name}: ${number(value)}${shown !== value ? `, smoothed ${number(shown)}` : ""}${low < high ? ` (${number(low)} to ${number(high)})` : ""}`]);
  });
  told.sort((a, b) => a[0] - b[0]);
  const box = plot.over.getBoundingClientRect();
  showHint(told.length ? [xText(plot.data[0][idx]), ...told.map(each => each[1])].join("\n") : "", box.left + left, box.top + Math.max(top, 0));
}

function drawAll() { measure(); charts.forEach(draw); maps.forEach(paint); }

// -- what the reader does --------------------------------------------------------------------------------------------
function zoom(range) {
  tools.zoom = range && [Math.max(range[0], whole[0]), Math.min(range[1], whole[1])];
  if (tools.zoom && !(tools.zoom[1] > tools.zoom[0])) tools.zoom = null;
  charts.forEach(chart => { const [min, max] = tools.zoom ?? whole; chart.plot.setScale("x", {min, max}); });
  mark();
  store();
}

// In and out around the middle, or around the cursor.
function scale(factor, middle) {
  const [low, high] = tools.zoom ?? whole, at = middle ?? (low + high) / 2;
  const range = [at - (at - low) * factor, at + (high - at) * factor];
  zoom(range[0] <= whole[0] && range[1] >= whole[1] ? null : range);
}

function mark() {
  document.querySelectorAll("[data-axis]").forEach(each => each.setAttribute("aria-pressed", each.dataset.axis === tools.axis));
  document.querySelectorAll("[data-zoom=reset]").forEach(each => { each.disabled = !tools.zoom; });
  document.querySelectorAll("#smooth").forEach(each => { each.value = tools.smooth; each.nextElementSibling.value = tools.smooth ? tools.smooth.toFixed(2) : "off"; });
  for (const chart of charts) chart.figure.querySelector("[data-log]")?.setAttribute("aria-pressed", chart.log);
}

for (const button of document.querySelectorAll("[data-axis]")) {
  button.addEventListener("click", () => { tools.axis = button.dataset.axis; tools.zoom = null; drawAll(); mark(); store(); });
}
for (const button of document.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", () => button.dataset.zoom === "reset" ? zoom(null) : scale(button.dataset.zoom === "in" ? 0.5 : 2));
}
document.getElementById("smooth")?.addEventListener("input", event => {
  tools.smooth = +event.target.value;
  charts.filter(chart => chart.spec.smooth).forEach(draw);
  mark();
  store();
});
for (const chart of charts) {
  chart.figure.querySelector("[data-log]")?.addEventListener("click", () => {
    chart.log = tools.log[chart.at] = !chart.log;
    draw(chart);
    mark();
    store();
  });
  for (const button of chart.figure.querySelectorAll("[data-serie]")) {
    button.addEventListener("click", () => {
      const at = +button.dataset.serie, off = !chart.hidden.has(at);
      chart.hidden[off ? "add" : "delete"](at);
      button.setAttribute("aria-pressed", !off);
      draw(chart);
    });
  }
  chart.box.addEventListener("keydown", event => {
    const plot = chart.plot, xs = plot.data[0], [low, high] = tools.zoom ?? whole, middle = plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : undefined;
    const turn = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (turn) {
      const begin = turn > 0 ? xs.findIndex(x => x >= low) : xs.findLastIndex(x => x <= high);
      const next = plot.cursor.left >= 0 && plot.cursor.idx != null ? plot.cursor.idx + turn : begin;
      const x = xs[Math.min(Math.max(next, 0), xs.length - 1)];
      pointed = chart;
      plot.setCursor({left: plot.valToPos(Math.min(Math.max(x, low), high), "x"), top: 20});
    } else if (event.key === "+" || event.key === "-") scale(event.key === "+" ? 0.5 : 2, middle);
    else if (event.key === "0" || event.key === "Escape") zoom(null);
    else return;
    event.preventDefault();
  });
  chart.box.addEventListener("blur", () => { if (pointed === chart) { pointed = null; showHint(""); } });
}

// -- the norms of the layers: a canvas, since rectangles of SVG would be ten thousand elements ------------------------------
const maps = [...document.querySelectorAll(".heat")].map(figure => ({
  canvas: figure.querySelector("canvas"), data: JSON.parse(figure.querySelector("script").textContent), left: 0, line: 18,
}));
function paint(map) {
  const {canvas, data} = map, width = canvas.clientWidth, ratio = Math.max(2, devicePixelRatio), count = data.rows.length;
  map.left = Math.min(190, width * 0.36);
  map.cell = (width - map.left) / data.steps.length;
  const height = count * map.line + 22, chars = Math.floor(map.left / 6.6) - 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const paper = canvas.getContext("2d");
  paper.scale(ratio, ratio);
  paper.font = "12px system-ui, sans-serif";
  paper.textBaseline = "middle";
  data.rows.forEach((row, at) => {
    const name = data.names[at];
    paper.fillStyle = tone("--ink-2");
    paper.textAlign = "right";
    paper.fillText(name.length <= chars ? name : "…" + name.slice(1 - chars), map.left - 8, at * map.line + map.line / 2);
    row.forEach((value, column) => {
      if (!(value > 0)) return;
      const part = data.high > data.low ? Math.log(value / data.low) / Math.log(data.high / data.low) : 0.5;
      paper.fillStyle = data.shades[Math.min(Math.max(Math.round(part * (data.shades.length - 1)), 0), data.shades.length - 1)];
      paper.fillRect(map.left + column * map.cell, at * map.line, map.cell + 0.3, map.line - 1);
    });
  });
  paper.fillStyle = tone("--ink-2");
  const every = Math.max(1, Math.ceil(64 / map.cell));
  data.steps.forEach((step, column) => {
    if (column % every) return;
    const x = map.left + column * map.cell;
    paper.textAlign = x > width - 50 ? "right" : "left";
    paper.fillText(step < 1e5 ? plain.format(step) : compact.format(step), x > width - 50 ? width : x, count * map.line + 12);
  });
}
for (const map of maps) {
  map.canvas.addEventListener("pointermove", event => {
    const box = map.canvas.getBoundingClientRect(), column = Math.floor((event.clientX - box.left - map.left) / map.cell);
    const row = Math.floor((event.clientY - box.top) / map.line), value = map.data.rows[row]?.[column];
    showHint(value == null ? "" : `${map.data.names[row]}\nstep ${plain.format(map.data.steps[column])}: ${number(value)}`, event.clientX, event.clientY);
  });
  map.canvas.addEventListener("pointerleave", () => showHint(""));
}

drawAll();
mark();
document.addEventListener("themechange", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
matchMedia("print").addEventListener("change", drawAll);
// Before a page is printed, the colours are still those of the screen.
let chosen;
addEventListener("beforeprint", () => { chosen = root.dataset.theme; root.dataset.theme = "light"; drawAll(); });
addEventListener("afterprint", () => { if (chosen) root.dataset.theme = chosen; else delete root.dataset.theme; drawAll(); });
let known = innerWidth;
addEventListener("resize", () => { if (innerWidth !== known) { known = innerWidth; drawAll(); } });
