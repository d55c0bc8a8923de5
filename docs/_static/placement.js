// The placement explorer: sizes of the modes and a placement in, the elements of every rank and its gradient reductions out.
"use strict";

pieces.start("placement", "placement-explorer", (root, table) => {
  const names = Object.keys(table.sizes);
  const state = { rank: 0 };
  const sizes = pieces.fields(root, "Sizes of the modes");
  const start = { data: 2, expert: 1, sequence: 1, pipeline: 1, tensor: 2 };
  const size = Object.fromEntries(
    names.map((name) => [name, pieces.choice(sizes, name, name, table.sizes[name], start[name], show)]),
  );
  const placed = pieces.fields(root, "The parameter");
  const where = {
    tensor: pieces.choice(placed, "on_tensor", "over tensor", [["whole", "replicated"], ["cut", "sharded: Shard(0)"], ["part", "replicated, with a partial gradient: Replicate(owes='sum')"]], "cut", show),
    expert: pieces.choice(placed, "on_expert", "over expert", [["whole", "replicated"], ["cut", "sharded: Shard(0)"]], "whole", show),
    pipeline: pieces.choice(placed, "on_pipeline", "over pipeline", [["own", "at one stage"], ["tied", "tied: first and last stage"]], "own", show),
  };
  const answer = pieces.make("div", { "aria-live": "polite", class: "piece-answer" });
  const ranks = pieces.make("div", { class: "piece-ranks", role: "group", "aria-label": "Ranks: choose one to see its shard and its reduction" });
  const detail = pieces.make("p", { "aria-live": "polite", class: "piece-detail" });
  root.append(answer, ranks, detail);
  show();

  function show() {
    for (const [name, select] of Object.entries(where)) {
      select.disabled = size[name].value === "1";
      if (select.disabled) select.selectedIndex = 0;
    }
    const layout = table.layouts[names.map((name) => size[name].value).join(",")];
    answer.replaceChildren();
    ranks.replaceChildren();
    detail.replaceChildren();
    if (!layout) {
      const odd = Number(size.data.value) % Number(size.expert.value);
      answer.append(pieces.make("p", {}, odd ? "The expert size must divide the data size here." : "This table has at most 16 ranks. Choose smaller sizes."));
      return;
    }
    const found = layout.placed[[where.tensor.value, where.expert.value, where.pipeline.value].join(",")];
    state.rank = Math.min(state.rank, layout.ranks.length - 1);
    if (found.held[state.rank] === "-") state.rank = 0;
    answer.append(summary(layout, found));
    layout.ranks.forEach((at, rank) => ranks.append(card(layout, found, at, rank)));
    tell(layout, found);
  }

  function summary(layout, found) {
    const lines = pieces.make("dl");
    const line = (name, key, text) => lines.append(pieces.make("dt", {}, name), pieces.make("dd", { "data-key": key }, text));
    line("Ranks", "world", String(layout.ranks.length));
    const sums = found.sums.map(([mode, letters]) => `over ${mode} ${pieces.groups(letters).map(pieces.list).join(" ")}`);
    line("Required all-reduces", "sums", sums.join("; and ") || "none: the gradient is final after the backward pass");
    line("Divisor", "divisor", String(found.divisor));
    line("Contribution to the norm", "share", `1/${found.holders} of the squares on each rank`);
    return lines;
  }

  function holds(found, rank) {
    if (found.held[rank] === "-") return "nothing";
    return found.parts.map(([mode, places]) => `shard ${places[rank]} over ${mode}`).join(", ") || "the full parameter";
  }

  function card(layout, found, at, rank) {
    const without = found.held[rank] === "-";
    const place = layout.axes.map((axis, index) => `${axis} ${at[index]}`).join(", ") || "alone";
    const colour = without ? "quiet" : `c${(found.held.charCodeAt(rank) - 97) % 6}`;
    const button = pieces.make(
      "button",
      { type: "button", class: `piece-rank ${colour}`, "aria-pressed": String(rank === state.rank), "data-rank": rank },
      pieces.make("strong", {}, `rank ${rank}`),
      pieces.make("span", {}, place),
      pieces.make("span", { "data-key": "holds" }, holds(found, rank)),
    );
    button.disabled = without;
    button.addEventListener("click", () => {
      state.rank = rank;
      for (const other of ranks.children) other.setAttribute("aria-pressed", String(other === button));
      tell(layout, found);
    });
    return button;
  }

  function tell(layout, found) {
    const rank = state.rank;
    const same = pieces.group(found.held, rank);
    const sum = pieces.group(found.joint, rank);
    for (const button of ranks.children) button.classList.toggle("in-sum", sum.length > 1 && sum.includes(Number(button.dataset.rank)));
    const with_ = sum.length > 1 ? `is all-reduced over ranks ${pieces.list(sum)} (outlined)` : "is not all-reduced";
    const divided = found.divisor > 1 ? ` and divided by ${found.divisor}` : " and not divided";
    const like = same.length > 1 ? `, like all ranks of ${pieces.list(same)} (same colour)` : `; no other rank stores these elements: ${pieces.list(same)}`;
    detail.textContent = `Rank ${rank} stores ${holds(found, rank)}${like}. Its gradient ${with_}${divided}.`;
  }
});
