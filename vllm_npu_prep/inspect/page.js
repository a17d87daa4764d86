"use strict";
// Traces a token from its line to its row of the mask, its block and its slot. Everything it knows
// stands in data attributes; texts go in as text, never as markup.
(() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const lines = all("tr[data-t]");
  const byToken = new Map(lines.map((line) => [line.dataset.t, line]));
  const bySlot = new Map();
  for (const line of lines)
    line.dataset.slots.split(" ").forEach((slot, group) => bySlot.set(`${group}:${slot}`, line));
  const masks = all(".mask");
  const sizes = all("[data-block-size]").map((map) => Number(map.dataset.blockSize));
  const blocks = new Map();
  for (const block of all(".block")) blocks.set(block.dataset.at, block);
  let kept = null;

  const number = (element, name) => Number(element.dataset[name]);

  // Scrolls the box around an element.
  function reveal(element) {
    const box = element.closest(".scroll, .pictures");
    const own = element.getBoundingClientRect(), around = box.getBoundingClientRect();
    if (own.top < around.top + 40 || own.bottom > around.bottom)
      box.scrollTop += (own.top + own.bottom - around.top - around.bottom) / 2;
  }

  // Scrolls the page where a line isn't seen for all that.
  function bring(line) {
    reveal(line);
    const { top, bottom } = line.getBoundingClientRect();
    const end = document.getElementById("trace").getBoundingClientRect().top;
    if (top < 0 || bottom > end) window.scrollBy(0, top < 0 ? top - 60 : bottom - end + 20);
  }

  function markMask(mask, token, position) {
    const chunk = number(mask, "chunk");
    const column = chunk ? position % chunk : position;
    const row = number(mask, "byPosition") ? column : token - number(mask, "first");
    const rows = number(mask, "rows"), columns = number(mask, "columns");
    mask.classList.toggle("on", row >= 0 && row < rows);
    for (const mark of mask.querySelectorAll(".band, .dot")) {
      mark.style.top = `${(100 * row) / rows}%`;
      mark.style.height = `${100 / rows}%`;
    }
    const dot = mask.querySelector(".dot");
    dot.style.left = `${(100 * column) / columns}%`;
    dot.style.width = `${100 / columns}%`;
  }

  function trace(line, pick) {
    for (const element of all(".traced")) element.classList.remove("traced");
    const token = number(line, "t"), position = number(line, "p"), row = line.dataset.r;
    line.classList.add("traced");
    for (const element of all(`[data-request="${row}"]`)) element.classList.add("traced");
    for (const mask of masks) markMask(mask, token, position);
    const steps = [];
    line.dataset.slots.split(" ").forEach((text, group) => {
      const slot = Number(text), size = sizes[group];
      const where = sizes.length > 1 ? `group ${group}: ` : "";
      if (slot < 0) return void steps.push(`${where}writes no slot`);
      const number = Math.floor(slot / size), offset = slot % size;
      const block = blocks.get(`${group}-${row}-${number}`);
      const entry = block ? `block_table[${row}][${block.dataset.place}] = ` : "block ";
      steps.push(`${where}${entry}${number}, block_offsets ${offset} \u2192 slot ${slot}`);
      if (!block) return;
      block.classList.add("traced");
      const mark = block.querySelector(".slot");
      mark.style.left = `${(100 * offset) / size}%`;
      mark.style.width = `${100 / size}%`;
      if (pick) reveal(block);
    });
    document.getElementById("trace").textContent =
      `token ${token} of request ${line.dataset.name}, position ${position} \u2192 ` +
      steps.join("; ");
    document.documentElement.dataset.traced = token;
  }

  function pick(line) {
    if (!line) return;
    kept = line;
    for (let fold = line.closest("details"); fold; fold = fold.parentElement.closest("details"))
      fold.open = true;
    bring(line);
    trace(line, true);
  }

  const lineOf = (event) => event.target.closest("tr[data-t]");
  document.addEventListener("mouseover", (event) => {
    const line = lineOf(event);
    if (line && !kept) trace(line, false);
  });
  document.addEventListener("click", (event) => {
    const line = lineOf(event);
    const mask = event.target.closest(".mask"), slots = event.target.closest(".slots");
    const at = (element, size, side) =>
      Math.floor((size * (event[side === "width" ? "clientX" : "clientY"] -
        element.getBoundingClientRect()[side === "width" ? "left" : "top"])) /
        element.getBoundingClientRect()[side]);
    if (line) {
      if (line === kept) kept = null;
      else pick(line);
    } else if (mask && !number(mask, "byPosition")) {
      pick(byToken.get(String(at(mask, number(mask, "rows"), "height") + number(mask, "first"))));
    } else if (slots && slots.parentElement.dataset.at) {
      const [group, , block] = slots.parentElement.dataset.at.split("-").map(Number);
      const size = sizes[group];
      pick(bySlot.get(`${group}:${block * size + at(slots, size, "width")}`));
    }
  });
  document.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") kept = null;
    if (!step || !kept) return;
    const next = lines[lines.indexOf(kept) + step];
    if (next) event.preventDefault();
    pick(next);
  });
  const follow = () => pick(byToken.get(location.hash.replace(/^#t/, "")));
  window.addEventListener("hashchange", follow);
  follow();
})();
