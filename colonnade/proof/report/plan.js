// The mesh and the timeline of a plan, drawn on canvases from a few numbers: a hundred thousand ranks are as little as four.
const plan = JSON.parse(document.getElementById("plan-data").textContent);
const color = at => getComputedStyle(root).getPropertyValue(`--c${at % 8}`).trim();
const tone = name => getComputedStyle(root).getPropertyValue(name).trim();

// A canvas that is sharp on any screen; `paint(context, width)` is called with CSS pixels whenever it must be drawn anew.
function sheet(canvas, height, paint) {
  const draw = () => {
    const width = canvas.clientWidth, tall = height(width), scale = devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(tall * scale);
    canvas.style.height = tall + "px";
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    paint(context, width, tall);
  };
  addEventListener("resize", draw);
  document.addEventListener("themechange", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
  return draw;
}

function few(ranks) {
  return ranks.length <= 8 ? ranks.join(", ") : `${ranks.slice(0, 4).join(", ")} … ${ranks[ranks.length - 1]} (${ranks.length} ranks)`;
}

// -- groups: a rank's group are the ranks that differ from it in the digits (stride, size) of the mode only ------------------
function firstOf(mode, rank) {
  if (!mode.digits) { const group = mode.groups.find(each => each.includes(rank)); return group ? group[0] : null; }
  return mode.digits.reduce((left, [stride, size]) => left - Math.floor(rank / stride) % size * stride, rank);
}

function groupOf(mode, rank) {
  if (!mode.digits) return mode.groups.find(each => each.includes(rank)) || [];
  let found = [firstOf(mode, rank)];
  for (const [stride, size] of mode.digits) found = found.flatMap(each => Array.from({length: size}, (_, at) => each + at * stride));
  return found.sort((a, b) => a - b);
}

function coordinates(rank) {
  const told = [];
  let left = rank;
  for (const [name, size] of Object.entries(plan.axes).reverse()) { told.unshift([name, left % size]); left = Math.floor(left / size); }
  return told;
}

// -- the mesh ------------------------------------------------------------------------------------------------------
(() => {
  const canvas = document.getElementById("mesh"), words = document.getElementById("mesh-words");
  const buttons = [...document.querySelectorAll("[data-mode]")], field = document.getElementById("mesh-rank");
  const count = plan.world_size, stages = plan.axes.pipeline || 1;
  const names = Object.keys(plan.axes), stride = names.slice(names.indexOf("pipeline") + 1).reduce((left, name) => left * plan.axes[name], 1);
  const stageOf = rank => stages > 1 ? Math.floor(rank / stride) % stages : 0;
  let chosen = "all", over = null, held = null;
  const shape = width => {
    let columns = count <= 64 ? Math.min(count, width < 500 ? 8 : 16) : Math.ceil(Math.sqrt(count * width / Math.min(480, width)));
    const replica = count / (plan.axes.data || 1), even = columns >= replica ? replica : plan.devices_per_node;
    if (columns > even && count > 64) columns = Math.round(columns / even) * even;
    // Few ranks fill the width with flat cells.
    const cell = width / columns, tall = Math.min(cell, 48);
    return {columns, cell, tall, rows: Math.ceil(count / columns)};
  };
  const redraw = sheet(canvas, width => { const {rows, tall} = shape(width); return rows * tall; }, (context, width) => {
    const {columns, cell, tall} = shape(width), gap = cell > 6 ? 1 : 0;
    const box = (rank, inset = 0) => context.fillRect(rank % columns * cell + inset, Math.floor(rank / columns) * tall + inset, cell - gap - 2 * inset, tall - gap - 2 * inset);
    const rank = held ?? over, mode = plan.modes.find(each => each.mode === chosen);
    const colors = Array.from({length: 8}, (_, at) => color(at));
    const numbers = new Map(), filled = new Set(), neutral = tone("--ink-2"), none = tone("--line");
    for (let each = 0; each < count; each++) {
      if (mode) {
        const first = firstOf(mode, each);
        if (!numbers.has(first)) numbers.set(first, numbers.size);
        context.fillStyle = first === null ? none : colors[numbers.get(first) % 7];
        if (first !== null) filled.add(each);
        context.globalAlpha = rank === null || first === firstOf(mode, rank) ? 1 : .25;
      } else {
        context.fillStyle = neutral;
        context.globalAlpha = stages > 1 ? .16 + .3 * stageOf(each) / (stages - 1) : .2;
      }
      box(each);
    }
    context.globalAlpha = 1;
    if (!mode && rank !== null) {
      const shown = plan.modes.map((each, at) => [groupOf(each, rank), at]);
      for (const [members, at] of shown.sort((a, b) => b[0].length - a[0].length)) {
        context.fillStyle = colors[at % 8];
        if (members.length > 1) members.forEach(each => { box(each); filled.add(each); });
      }
    }
    if (rank !== null) { context.fillStyle = tone("--ink"); box(rank, cell > 12 ? 3 : 0); }
    if (cell >= 26) {
      const onColor = tone("--card"), onPaper = tone("--ink");
      context.font = "12px system-ui, sans-serif"; context.textAlign = "center"; context.textBaseline = "middle";
      for (let each = 0; each < count; each++) {
        context.fillStyle = each === rank || filled.has(each) && context.globalAlpha === 1 ? onColor : onPaper;
        context.fillText(each, (each % columns + .5) * cell, (Math.floor(each / columns) + .5) * tall);
      }
    }
  });
  const describe = rank => {
    const kind = plan.classes.find(each => each.pipeline_rank === stageOf(rank));
    const lines = [`rank ${rank}: ${coordinates(rank).map(([name, at]) => `${name} ${at}`).join(", ")}; node ${Math.floor(rank / plan.devices_per_node)}`];
    for (const mode of plan.modes) { const members = groupOf(mode, rank); if (members.length > 1) lines.push(`${mode.mode}: ${few(members)}`); }
    if (kind) lines.push(`holds ${kind.shards}`);
    return lines.join("\n");
  };
  const at = event => {
    const box = canvas.getBoundingClientRect(), {columns, cell, tall} = shape(box.width);
    const column = Math.floor((event.clientX - box.left) / cell), rank = Math.floor((event.clientY - box.top) / tall) * columns + column;
    return column < columns && rank >= 0 && rank < count ? rank : null;
  };
  const select = rank => { held = rank; words.textContent = rank === null ? "" : describe(rank); redraw(); };
  canvas.addEventListener("pointermove", event => {
    const rank = at(event);
    if (rank !== over) { over = rank; redraw(); }
    showHint(rank === null ? "" : describe(rank), event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => { over = null; showHint(""); redraw(); });
  canvas.addEventListener("click", event => { const rank = at(event); select(rank === held ? null : rank); field.value = held ?? ""; });
  field.addEventListener("input", () => { const rank = field.value === "" ? null : +field.value; select(rank !== null && rank >= 0 && rank < count ? rank : null); });
  for (const button of buttons) {
    button.addEventListener("click", () => {
      chosen = button.dataset.mode;
      buttons.forEach(each => each.setAttribute("aria-pressed", each === button));
      redraw();
    });
  }
})();

// -- the timeline: actions are [kind, stage, micro-batch, start, end], times in parts of the makespan ------------------------
if (plan.timeline) (() => {
  const canvas = document.getElementById("timeline"), {rows, parts, makespan} = plan.timeline;
  const line = Math.max(8, Math.min(26, 480 / rows.length)), left = 34, kinds = {F: 0, B: 1, I: 1, W: 2};
  const names = {F: "forward", B: "backward", I: "backward, input part", W: "backward, weight part"};
  sheet(canvas, () => rows.length * line + 22, (context, width) => {
    const colors = [color(0), color(4), color(2)], wide = width - left;
    context.font = "12px system-ui, sans-serif"; context.textBaseline = "middle"; context.textAlign = "center";
    rows.forEach((row, at) => {
      context.fillStyle = tone("--line"); context.fillRect(left, at * line, wide, line - 1);
      for (const [kind, , micro, start, end] of row) {
        const x = left + start / parts * wide, w = (end - start) / parts * wide;
        context.fillStyle = colors[kinds[kind]];
        context.fillRect(x, at * line, Math.max(w - (w > 3 ? .7 : 0), .5), line - 1);
        if (w > 14 && line > 13) { context.fillStyle = tone("--card"); context.fillText(micro, x + w / 2, at * line + line / 2); }
      }
      if (line > 11 || at % 4 === 0) { context.fillStyle = tone("--ink-2"); context.fillText(at, left / 2, at * line + line / 2); }
    });
    context.fillStyle = tone("--ink-2"); context.textAlign = "left"; context.fillText("0", left, rows.length * line + 12);
    context.textAlign = "right"; context.fillText(makespan, width, rows.length * line + 12);
    context.textAlign = "center"; context.fillText("time of a step", left + wide / 2, rows.length * line + 12);
  });
  canvas.addEventListener("pointermove", event => {
    const box = canvas.getBoundingClientRect(), row = Math.floor((event.clientY - box.top) / line);
    const time = (event.clientX - box.left - left) / (box.width - left) * parts;
    const found = (rows[row] || []).find(each => each[3] <= time && time < each[4]);
    const told = found ? `pipeline rank ${row}: ${names[found[0]]} of micro-batch ${found[2]}, stage ${found[1]}` : rows[row] && time >= 0 ? `pipeline rank ${row} waits` : "";
    showHint(told, event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => showHint(""));
})();
