"use strict";
// Draws a recorded run from the JSON of the page: steps, requests and ranks over the same axis of
// steps. Only what is visible is drawn; texts go in as text, never as markup.
(() => {
  const run = JSON.parse(document.getElementById("run").textContent);
  const byId = (id) => document.getElementById(id);
  const GUTTER = 150, ROW = 15, MOST_LINES = 300;
  const expanded = (runs) =>
    runs.flatMap(([first, count]) => Array.from({ length: count }, (_, i) => first + i));
  const numbers = expanded(run.numbers), total = numbers.length;
  const indexOf = new Map(numbers.map((number, index) => [number, index]));
  const comma = (value) => value.toLocaleString("en-US");
  const counted = (n, noun) => `${comma(n)} ${noun}${n === 1 ? "" : "s"}`;
  const micros = (us) =>
    us < 1000 ? `${us} µs` : us < 1e6 ? `${(us / 1e3).toPrecision(3)} ms` : `${(us / 1e6).toPrecision(3)} s`;

  // ------------------------------------------------------------------ what the records say

  const ranks = run.ranks.map((rank) => {
    const index = expanded(rank.steps);
    const at = new Int32Array(total).fill(-1);
    index.forEach((step, place) => (at[step] = place));
    const period = index.map((step, place) => {
      const own = rank.times[place], next = rank.times[place + 1];
      const follows = own && next && numbers[index[place + 1]] === numbers[step] + 1;
      return follows ? Math.max(next[0] - own[0], 0) : null;
    });
    return { ...rank, index, at, period, timed: rank.times.some((times) => times) };
  });
  ranks.forEach((rank, place) => {
    const like = rank.rows_like === null ? null : run.ranks[rank.rows_like].rows;
    rank.list = rank.rows.map((row, i) => {
      const [name, prompt, spans, hits, preemptions] = like ? [row, ...like[i].slice(1)] : row;
      const last = spans[spans.length - 1];
      return {
        name, prompt, hits, preemptions, place: i,
        spans: spans.map(([first, steps, stride, inPrompt, computed, scheduled, drafts, accepted]) => ({
          first, steps, stride, inPrompt, computed, scheduled, drafts, accepted: accepted || "",
          last: first + (steps - 1) * stride,
        })),
        first: spans[0][0],
        end: last[0] + (last[1] - 1) * last[2] + 1,
      };
    });
    const paged = new Set(rank.pages ? expanded(rank.pages.steps) : []);
    rank.pageOf = (step) => (paged.has(step) ? `${rank.pages.begin}${numbers[step]}${rank.pages.end}` : null);
    rank.place = place;
  });
  const acceptedAt = (span, place) => {
    const text = span.accepted[place];
    return text === undefined || text === "?" ? null : text === "+" ? 36 : parseInt(text, 36);
  };
  // What a request does in a step: its span, and which of the span's steps that is.
  function inStep(request, step) {
    let low = 0, high = request.spans.length - 1;
    while (low <= high) {
      const middle = (low + high) >> 1, span = request.spans[middle];
      if (step < span.first) high = middle - 1;
      else if (step > span.last) low = middle + 1;
      else {
        const place = (step - span.first) / span.stride;
        return Number.isInteger(place) ? { span, place } : null;
      }
    }
    return null;
  }
  // Tokens computed before a step of a span.
  function computedAt(span, place) {
    let computed = span.computed + place * (span.scheduled - span.drafts);
    for (let i = 0; span.drafts && i < place; i++) computed += acceptedAt(span, i) || 0;
    return computed;
  }

  // The same request on another rank: engines have ranks in one order, and share names.
  const onRank = (request, from, to) => (from.engine === to.engine
    ? to.list[request.place] : to.list.find((other) => other.name === request.name)) || null;

  // ------------------------------------------------------------------ what is shown

  const view = { low: 0, high: total, step: 0, rank: 0, request: null };
  let rows = ranks[0].list, due = false, colours = {};
  const lanes = byId("lanes"), scroller = byId("rows");
  const rowCanvas = scroller.querySelector("canvas"), rowSpace = scroller.querySelector("div");
  const TRACKS = ranks.length > 2 ? { tokens: 46, time: 26, blocks: 26 } : { tokens: 76, time: 42, blocks: 46 };

  for (const rank of ranks) {
    const lane = document.createElement("div"), canvas = document.createElement("canvas");
    lane.className = "lane";
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "slider");
    canvas.setAttribute("aria-label", `steps ${rank.title}`.trim());
    canvas.setAttribute("aria-valuemin", numbers[0]);
    canvas.setAttribute("aria-valuemax", numbers[total - 1]);
    lane.append(canvas);
    let top = 6;
    const tracks = [["tokens", TRACKS.tokens], ["graph", 9]];
    if (rank.timed) tracks.push(["time", TRACKS.time], ["period", TRACKS.time]);
    if (rank.blocks.length) tracks.push(["blocks", TRACKS.blocks]);
    rank.tracks = tracks.map(([name, height]) => {
      const label = document.createElement("div");
      label.style.top = `${name === "graph" ? top - 3 : top}px`;
      lane.append(label);
      const track = { name, top, height, label };
      top += height + 9;
      return track;
    });
    rank.height = top + 12;
    Object.assign(rank, { lane, canvas });
    lanes.append(lane);
    const option = document.createElement("option");
    option.value = rank.place;
    option.textContent = rank.title || rank.folder.split("/").pop();
    byId("rank").append(option);
  }
  byId("rank").parentElement.hidden = ranks.length === 1;
  Object.assign(byId("goto"), { min: numbers[0], max: numbers[total - 1] });

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    const names = ["ink", "faint", "line", "track", "gap", "padding", "wait", "full", "piecewise", "eager",
      "time", "period", "blocks", "prompt", "decode", "accepted", "hit", "cursor", "mark", "ground"];
    for (let i = 0; i < run.state_names.length; i++) names.push(`state-${i}`);
    colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  const stateColour = (state) => colours[`state-${run.state_names.indexOf(run.states[state])}`];
  const kindColour = (kind) => {
    const text = run.kinds[kind];
    return colours[text.startsWith("full") ? "full" : text.startsWith("piecewise") ? "piecewise" : "eager"];
  };

  // A canvas in device pixels, cleared.
  function fresh(canvas, width, height) {
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = '11px system-ui, "DejaVu Sans", sans-serif';
    pen.textBaseline = "middle";
    return pen;
  }
  const xOf = (step, width) => GUTTER + ((step - view.low) / (view.high - view.low)) * (width - GUTTER);

  // Steps as the columns that they are drawn in: one each, or several that share a pixel.
  function columns(width) {
    const room = Math.max(Math.floor(width - GUTTER), 1), shown = view.high - view.low, found = [];
    if (shown <= room) {
      const from = Math.max(Math.floor(view.low), 0), to = Math.min(Math.ceil(view.high), total);
      for (let step = from; step < to; step++) {
        const x = xOf(step, width), end = xOf(step + 1, width);
        found.push({ first: step, end: step + 1, x, width: end - x > 4 ? end - x - 1 : end - x });
      }
      return found;
    }
    for (let pixel = 0; pixel < room; pixel++) {
      const first = Math.floor(view.low + (pixel * shown) / room);
      const end = Math.max(first + 1, Math.floor(view.low + ((pixel + 1) * shown) / room));
      if (first >= 0 && first < total) found.push({ first, end: Math.min(end, total), x: GUTTER + pixel, width: 1 });
    }
    return found;
  }

  // What a rank did in the steps of a column.
  function gathered(rank, column) {
    let largest = -1, prepared = -1, period = -1, waits = 0, steps = 0;
    const kinds = new Map(), blocks = rank.blocks.map(() => 0);
    for (let step = column.first; step < column.end; step++) {
      const at = rank.at[step];
      if (at < 0) continue;
      steps++;
      const size = rank.tokens[at] + rank.padding[at];
      if (largest < 0 || size > rank.tokens[largest] + rank.padding[largest]) largest = at;
      kinds.set(rank.kind[at], (kinds.get(rank.kind[at]) || 0) + 1);
      const times = rank.times[at];
      if (times) {
        prepared = Math.max(prepared, times[1]);
        waits += times[2];
      }
      if (rank.period[at] !== null) period = Math.max(period, rank.period[at]);
      rank.blocks.forEach((of, group) => (blocks[group] = Math.max(blocks[group], of[at])));
    }
    return { ...column, largest, prepared, period, waits, steps, kinds, blocks };
  }

  // The top of a scale, and whether some are higher: rare long times would flatten all others.
  function scaleOf(values) {
    const sorted = values.filter((value) => value >= 0).sort((a, b) => a - b);
    if (!sorted.length) return { top: 1, cut: false };
    const top = sorted[sorted.length - 1], most = 1.5 * sorted[Math.floor(0.97 * (sorted.length - 1))];
    return top > most && most > 0 ? { top: most, cut: true } : { top: top || 1, cut: false };
  }

  // What all lanes share, so that ranks compare: steps of each and the tops of the scales.
  function measured(width) {
    const shared = columns(width);
    const cells = ranks.map((rank) => shared.map((column) => gathered(rank, column)).filter((c) => c.steps));
    const all = cells.flat();
    let tokens = 1, blocks = 1;
    ranks.forEach((rank, place) => {
      for (const cell of cells[place]) {
        tokens = Math.max(tokens, rank.tokens[cell.largest] + rank.padding[cell.largest]);
        blocks = Math.max(blocks, ...cell.blocks);
      }
    });
    return { cells, tokens, blocks, time: scaleOf(all.map((c) => c.prepared)), period: scaleOf(all.map((c) => c.period)) };
  }

  function title(track, name, text) {
    track.label.textContent = "";
    const strong = document.createElement("b");
    strong.textContent = name;
    track.label.append(strong);
    if (text && track.height > 30) track.label.append(document.createElement("br"));
    if (text) track.label.append(` ${text}`);
  }

  function drawLane(rank, cells, tops, width) {
    const pen = fresh(rank.canvas, width, rank.height);
    const room = width - GUTTER;
    rank.lane.classList.toggle("chosen", ranks.length > 1 && rank.place === view.rank);
    for (const track of rank.tracks) {
      const { top, height, name } = track, bottom = top + height;
      pen.fillStyle = colours.track;
      pen.fillRect(GUTTER, top, room, height);
      const bar = (cell, share, colour, from = 0) => {
        pen.fillStyle = colour;
        const size = Math.max(share * height, share > 0 ? 1 : 0);
        pen.fillRect(cell.x, bottom - from - size, Math.max(cell.width, 1), size);
        return size;
      };
      if (name === "tokens") {
        title(track, rank.title ? `${rank.title}, tokens` : "tokens", `up to ${comma(tops.tokens)}`);
        for (const cell of cells) {
          const size = bar(cell, rank.tokens[cell.largest] / tops.tokens, stateColour(rank.state[cell.largest]));
          if (rank.padding[cell.largest]) bar(cell, rank.padding[cell.largest] / tops.tokens, colours.padding, size);
        }
      } else if (name === "graph") {
        title(track, "graph", "");
        for (const cell of cells) {
          let from = 0;
          for (const [kind, count] of cell.kinds) from += bar(cell, count / cell.steps, kindColour(kind), from);
        }
      } else if (name === "blocks") {
        const pool = rank.config.num_blocks;
        title(track, "KV blocks", `up to ${comma(tops.blocks)}${pool ? ` of ${comma(pool)}` : ""}`);
        rank.blocks.forEach((_, group) => {
          pen.globalAlpha = rank.blocks.length > 1 ? 0.55 : 1;
          for (const cell of cells) bar(cell, cell.blocks[group] / tops.blocks, colours.blocks);
          pen.globalAlpha = 1;
        });
      } else {
        const key = name === "time" ? "prepared" : "period", scale = tops[name];
        title(track, name === "time" ? "host time" : "step to step",
          `up to ${micros(Math.round(scale.top))}${scale.cut ? ", longer ones cut" : ""}`);
        for (const cell of cells) {
          if (cell[key] >= 0) bar(cell, Math.min(cell[key] / scale.top, 1), colours[name]);
          if (cell[key] > scale.top) {
            pen.fillStyle = colours.wait;
            pen.fillRect(cell.x, top, Math.max(cell.width, 1), 2);
          }
          if (name === "time" && cell.waits) {
            pen.fillStyle = colours.wait;
            pen.fillRect(cell.x, bottom + 1, Math.max(cell.width, 2), 4);
          }
        }
      }
    }
    pen.clearRect(0, 0, GUTTER, rank.height - 14);
    drawAxis(pen, rank, width);
    drawCursor(pen, width, rank.height - 14);
  }

  function drawAxis(pen, rank, width) {
    pen.fillStyle = colours.faint;
    pen.textAlign = "center";
    const most = Math.max(Math.floor((width - GUTTER) / 80), 1), shown = view.high - view.low;
    let every = 1;
    for (const size of [1, 2, 5].flatMap((n) => [...Array(9)].map((_, i) => n * 10 ** i)).sort((a, b) => a - b))
      if (shown / size <= most) { every = size; break; }
    for (let step = Math.max(Math.floor(view.low), 0); step < Math.min(view.high, total); step++) {
      const isGap = step > 0 && numbers[step] !== numbers[step - 1] + 1;
      if (isGap) {
        pen.fillStyle = colours.faint;
        pen.fillRect(xOf(step, width), 0, 1, rank.height - 14);
      }
      if (numbers[step] % every === 0 || isGap) {
        const x = xOf(step + 0.5, width), text = String(numbers[step]), half = pen.measureText(text).width / 2;
        if (x > GUTTER - 1 && x + half < width) pen.fillText(text, Math.max(x, GUTTER + half), rank.height - 8);
      }
    }
  }

  function drawCursor(pen, width, height) {
    const x = xOf(view.step, width), end = xOf(view.step + 1, width);
    if (end < GUTTER || x > width) return;
    pen.strokeStyle = colours.cursor;
    pen.lineWidth = 1;
    const size = Math.max(end - x, 3), left = Math.max(end - x < 3 ? x - 1 : x, GUTTER);
    pen.strokeRect(left - 0.5, 0.5, size, height - 1);
  }

  // ------------------------------------------------------------------ requests

  function drawRows(width) {
    const height = Math.min(Math.max(rows.length * ROW + 4, 40), Math.round(window.innerHeight * 0.46));
    const pen = fresh(rowCanvas, width, height);
    rowSpace.style.height = `${Math.max(rows.length * ROW + 4 - height, 0)}px`;
    const first = Math.floor(scroller.scrollTop / ROW);
    const perStep = (width - GUTTER) / (view.high - view.low);
    for (let place = first; place < Math.min(rows.length, first + Math.ceil(height / ROW) + 1); place++) {
      const request = rows[place], top = place * ROW - scroller.scrollTop + 2, tall = ROW - 4;
      if (request === view.request) {
        pen.fillStyle = colours.mark;
        pen.fillRect(0, top - 2, width, ROW);
      }
      pen.fillStyle = colours.ink;
      pen.textAlign = "left";
      pen.save();
      pen.beginPath();
      pen.rect(0, top - 2, GUTTER - 8, ROW);
      pen.clip();
      pen.fillText(request.name, 8, top + tall / 2 + 1);
      pen.restore();
      pen.save();
      pen.beginPath();
      pen.rect(GUTTER, top - 2, width - GUTTER, ROW);
      pen.clip();
      const from = xOf(request.first, width), to = xOf(request.end, width);
      if (to >= GUTTER && from <= width) {
        pen.fillStyle = colours.gap;
        pen.fillRect(from, top + tall / 2, Math.max(to - from, 1), 1);
        for (const span of request.spans) drawSpan(pen, span, top, tall, width, perStep);
        for (const [step] of request.hits) {
          pen.fillStyle = colours.hit;
          pen.beginPath();
          pen.arc(xOf(step, width) + 1, top + tall / 2, 3.5, 0, 2 * Math.PI);
          pen.fill();
        }
        for (const step of request.preemptions) {
          pen.fillStyle = colours.wait;
          pen.fillRect(xOf(step, width) - 1, top - 2, 2.5, ROW);
        }
      }
      pen.restore();
    }
    drawCursor(pen, width, height);
  }

  function drawSpan(pen, span, top, tall, width, perStep) {
    const x = xOf(span.first, width), end = xOf(span.last + 1, width);
    if (end < GUTTER || x > width) return;
    pen.fillStyle = span.inPrompt ? colours.prompt : colours.decode;
    if (span.stride > 1 && perStep >= 3) {
      for (let place = 0; place < span.steps; place++)
        pen.fillRect(xOf(span.first + place * span.stride, width), top, perStep - 1, tall);
    } else {
      pen.fillRect(x, top, Math.max(end - x - (span.inPrompt && perStep > 4 ? 1 : 0), 1), tall);
      if (span.inPrompt && perStep > 4) {
        pen.fillStyle = colours.ground;
        for (let place = 1; place < span.steps; place++)
          pen.fillRect(xOf(span.first + place * span.stride, width) - 1, top, 1, tall);
      }
    }
    if (!span.drafts) return;
    pen.fillStyle = colours.accepted;
    const group = Math.max(1, Math.ceil(1 / (perStep * span.stride)));
    const start = Math.max(0, Math.floor((view.low - span.first) / span.stride / group) * group);
    for (let place = start; place < span.steps; place += group) {
      const left = xOf(span.first + place * span.stride, width);
      if (left > width) break;
      let most = 0;
      for (let i = place; i < Math.min(place + group, span.steps); i++) most = Math.max(most, acceptedAt(span, i) || 0);
      const size = (tall * Math.min(most, span.drafts)) / span.drafts;
      pen.fillRect(left, top + tall - size, Math.max(perStep - (perStep > 4 ? 1 : 0), 1), size);
    }
  }

  // The requests that are listed: those of the steps that are shown.
  function chooseRows() {
    const text = byId("find").value.trim(), list = ranks[view.rank].list;
    rows = list.filter((r) => r.first < view.high && r.end > view.low && r.name.includes(text));
    byId("count").textContent = rows.length === list.length
      ? counted(list.length, "request")
      : `${comma(rows.length)} of ${counted(list.length, "request")}`;
    redraw();
  }

  function reveal(place) {
    const top = place * ROW, height = rowCanvas.clientHeight || 200;
    if (top < scroller.scrollTop || top + ROW > scroller.scrollTop + height) scroller.scrollTop = top - height / 2;
  }

  // ------------------------------------------------------------------ one step

  function element(tag, text, parent) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  function facts(pairs, parent) {
    const list = element("dl", undefined, parent);
    for (const [name, text] of pairs) {
      element("dt", name, list);
      element("dd", text, list);
    }
  }

  function grid(headings, lines, parent) {
    const box = element("div", undefined, parent);
    box.className = "scroll";
    const table = element("table", undefined, box), body = element("tbody");
    const head = element("tr", undefined, element("thead", undefined, table));
    for (const heading of headings) element("th", heading, head);
    table.append(body);
    return lines.map((cells) => {
      const line = element("tr", undefined, body);
      for (const cell of cells) element("td", cell, line);
      return line;
    });
  }

  function describe(rank, at) {
    const times = rank.times[at], pool = rank.config.num_blocks;
    const pairs = [
      ["state", run.states[rank.state[at]]],
      ["graph", run.kinds[rank.kind[at]]],
      ["tokens", comma(rank.tokens[at])],
      ["padding", `${counted(rank.padding[at], "token")}, ${counted(rank.padding_requests[at], "request")}`],
      ["requests", comma(rank.requests[at])],
    ];
    if (rank.drafts[at]) pairs.push(["drafts", comma(rank.drafts[at])]);
    if (times) {
      pairs.push(["host time", micros(times[1])], ["waits", comma(times[2])]);
      if (rank.period[at] !== null) pairs.push(["next step after", micros(rank.period[at])]);
      pairs.push(["began at", micros(times[0])]);
    }
    rank.blocks.forEach((of, group) => pairs.push([
      rank.blocks.length > 1 ? `KV blocks, group ${group}` : "KV blocks",
      comma(of[at]) + (pool ? ` of ${comma(pool)}` : ""),
    ]));
    return pairs;
  }

  function showSide() {
    const side = byId("side"), rank = ranks[view.rank], at = rank.at[view.step];
    side.textContent = "";
    element("h2", `step ${numbers[view.step]}${rank.title ? `, ${rank.title}` : ""}`, side);
    const page = rank.pageOf(view.step);
    if (page) {
      const link = element("a", "all of this step (Enter)", element("p", undefined, side));
      link.id = "page";
      link.href = page;
    }
    if (at < 0) {
      element("p", "This rank has no record of it.", side).className = "note";
      return;
    }
    facts(describe(rank, at), side);
    const beside = ranks.filter((other) => other.engine === rank.engine && other.at[view.step] >= 0);
    if (beside.length > 1) {
      element("h2", "beside the other ranks", side);
      grid(["rank", "state", "tokens", "host time", "waits"], beside.map((other) => {
        const place = other.at[view.step], times = other.times[place];
        return [other.title, run.states[other.state[place]], comma(other.tokens[place]),
          times ? micros(times[1]) : "-", times ? comma(times[2]) : "-"];
      }), side);
    }
    element("h2", "requests of the step", side);
    const present = rank.list.map((request) => [request, inStep(request, view.step)]).filter(([, found]) => found);
    const lines = grid(["request", "part", "before", "tokens", "accepted"],
      present.slice(0, MOST_LINES).map(([request, { span, place }]) => [
        request.name, span.inPrompt ? "prompt" : "decode", comma(computedAt(span, place)), comma(span.scheduled),
        span.drafts ? `${acceptedAt(span, place) === null ? "?" : acceptedAt(span, place)} of ${span.drafts}` : "-",
      ]), side);
    lines.forEach((line, i) => {
      line.title = present[i][0].name;
      line.classList.toggle("traced", present[i][0] === view.request);
      line.addEventListener("click", () => choose(view.step, view.rank, present[i][0]));
    });
    if (present.length > MOST_LINES) element("p", `${comma(present.length - MOST_LINES)} more are left out`, side).className = "note";
    if (view.request) {
      showRequest(view.request, side);
      showElsewhere(view.request, side);
    }
    if (page) return;
    element("h2", "all of this step", side);
    element("code", `${run.command} ${rank.quoted_folder} --step ${numbers[view.step]} --html step.html`, side);
  }

  function showRequest(request, side) {
    element("h2", `request ${request.name}`, side);
    let accepted = 0, drafts = 0;
    for (const span of request.spans)
      for (let i = 0; i < span.accepted.length; i++)
        if (acceptedAt(span, i) !== null) {
          accepted += acceptedAt(span, i);
          drafts += span.drafts;
        }
    const steps = request.spans.reduce((sum, span) => sum + span.steps, 0);
    const pairs = [
      ["prompt", counted(request.prompt, "token")],
      ["steps", `${comma(steps)}, ${numbers[request.first]} to ${numbers[request.end - 1]}`],
    ];
    if (drafts) pairs.push(["drafts accepted", `${comma(accepted)} of ${comma(drafts)}`]);
    for (const [step, tokens] of request.hits)
      pairs.push(["prefix hit", `${counted(tokens, "token")} in step ${numbers[step]}`]);
    if (request.preemptions.length)
      pairs.push(["preempted", `back in ${request.preemptions.map((step) => numbers[step]).join(", ")}`]);
    facts(pairs, side);
  }

  // The request in the other engines: a click goes to its first step there.
  function showElsewhere(request, side) {
    const own = ranks[view.rank];
    const found = ranks.filter((rank) => rank.engine !== own.engine)
      .map((rank) => [rank, onRank(request, own, rank)]).filter(([, other]) => other);
    if (!found.length) return;
    element("h2", "in the other engines", side);
    const when = (rank, step) => (rank.times[rank.at[step]] ? micros(rank.times[rank.at[step]][0]) : "-");
    const lines = grid(["engine", "steps", "first began at", "last began at"],
      [[own, request], ...found].map(([rank, { first, end }]) => [
        rank.title, `${numbers[first]} to ${numbers[end - 1]}`, when(rank, first), when(rank, end - 1)]), side);
    lines.slice(1).forEach((line, i) => line.addEventListener("click", () => choose(found[i][1].first, found[i][0].place)));
  }

  // ------------------------------------------------------------------ drawing and choosing

  function draw() {
    const width = Math.max(lanes.clientWidth - 2, GUTTER + 60), tops = measured(width);
    ranks.forEach((rank, place) => drawLane(rank, tops.cells[place], tops, width));
    drawRows(width);
    const first = Math.max(Math.floor(view.low), 0), last = Math.min(Math.ceil(view.high), total) - 1;
    byId("range").textContent = `${numbers[first]} to ${numbers[last]} of ${counted(total, "step")}`;
    document.documentElement.dataset.drawn = `${first}-${last}`;
  }

  function redraw() {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      draw();
    });
  }

  function choose(step, rank = view.rank, request = view.request) {
    view.step = Math.min(Math.max(step, 0), total - 1);
    if (rank !== view.rank) {
      request = request && onRank(request, ranks[view.rank], ranks[rank]);
      view.rank = rank;
      byId("rank").value = rank;
      chooseRows();
    }
    view.request = request;
    const shown = view.high - view.low;
    if (view.step < view.low || view.step + 1 > view.high) show(view.step + 0.5 - shown / 2, shown);
    const present = rows.findIndex((each) => inStep(each, view.step));
    if (present >= 0 && !request) reveal(present);
    const own = ranks[view.rank], at = own.at[view.step];
    const text = at < 0 ? "not recorded" : `${run.states[own.state[at]]}, ${counted(own.tokens[at], "token")}`;
    for (const each of ranks) {
      each.canvas.setAttribute("aria-valuenow", numbers[view.step]);
      each.canvas.setAttribute("aria-valuetext", `step ${numbers[view.step]}: ${text}`);
    }
    rowCanvas.setAttribute("aria-valuetext", request ? `request ${request.name}` : "none");
    byId("goto").value = numbers[view.step];
    document.documentElement.dataset.step = numbers[view.step];
    history.replaceState(null, "", `#step=${numbers[view.step]}${ranks.length > 1 ? `&rank=${view.rank}` : ""}`);
    showSide();
    redraw();
  }

  function show(low, shown) {
    shown = Math.min(Math.max(shown, Math.min(8, total)), total);
    view.low = Math.min(Math.max(low, 0), total - shown);
    view.high = view.low + shown;
    chooseRows();
  }
  function zoom(factor, around = view.step + 0.5) {
    const shown = view.high - view.low;
    if (around < view.low || around > view.high) around = view.low + shown / 2;
    show(around - (around - view.low) * factor, shown * factor);
  }

  const stepAt = (canvas, clientX) => {
    const box = canvas.getBoundingClientRect();
    const share = (clientX - box.left - GUTTER) / (box.width - GUTTER);
    return view.low + share * (view.high - view.low);
  };

  // A click chooses; a drag shows the steps between.
  function mouse(canvas, clicked) {
    let from = null;
    canvas.addEventListener("pointerdown", (event) => (from = event.clientX));
    canvas.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const start = from;
      from = null;
      if (Math.abs(event.clientX - start) < 6) return clicked(Math.floor(stepAt(canvas, event.clientX)), event);
      const ends = [start, event.clientX].map((x) => stepAt(canvas, x)).sort((a, b) => a - b);
      show(Math.max(ends[0], 0), Math.min(ends[1], total) - Math.max(ends[0], 0));
    });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, stepAt(canvas, event.clientX));
    }, { passive: false });
  }

  // The page of the chosen step, where there is one.
  function open() {
    const page = ranks[view.rank].pageOf(view.step);
    if (page) location.assign(page);
    return Boolean(page);
  }

  function keys(event, vertical) {
    const page = Math.max(Math.round((view.high - view.low) * 0.9), 1);
    const moves = { ArrowLeft: event.shiftKey ? -10 : -1, ArrowRight: event.shiftKey ? 10 : 1,
      PageUp: -page, PageDown: page, Home: -total, End: total };
    const zooms = { "+": 0.5, "=": 0.5, "-": 2, 0: Infinity };
    if (vertical && (event.key === "ArrowUp" || event.key === "ArrowDown")) vertical(event.key === "ArrowUp" ? -1 : 1);
    else if (event.key in moves) choose(view.step + moves[event.key]);
    else if (event.key in zooms && !event.ctrlKey) event.key === "0" ? show(0, total) : zoom(zooms[event.key]);
    else if (event.key === "Escape" && view.request) choose(view.step, view.rank, null);
    else if (event.key !== "Enter" || !open()) return;
    event.preventDefault();
  }

  for (const rank of ranks) {
    mouse(rank.canvas, (step) => choose(step, rank.place));
    rank.canvas.addEventListener("dblclick", open);
    rank.canvas.addEventListener("keydown", (event) => keys(event, (by) => {
      const next = ranks[Math.min(Math.max(rank.place + by, 0), ranks.length - 1)];
      next.canvas.focus();
      choose(view.step, next.place);
    }));
  }
  function chooseRow(place) {
    const request = rows[Math.min(Math.max(place, 0), rows.length - 1)];
    if (!request) return;
    reveal(rows.indexOf(request));
    choose(inStep(request, view.step) ? view.step : request.first, view.rank, request);
  }
  mouse(rowCanvas, (step, event) => {
    const place = Math.floor((event.clientY - rowCanvas.getBoundingClientRect().top + scroller.scrollTop) / ROW);
    if (!rows[place]) return;
    const inGutter = event.clientX - rowCanvas.getBoundingClientRect().left < GUTTER;
    choose(inGutter ? rows[place].first : step, view.rank, rows[place]);
  });
  rowCanvas.addEventListener("keydown", (event) => keys(event, (by) =>
    chooseRow(view.request ? rows.indexOf(view.request) + by : 0)));
  scroller.addEventListener("scroll", redraw);
  byId("in").addEventListener("click", () => zoom(0.5));
  byId("out").addEventListener("click", () => zoom(2));
  byId("all").addEventListener("click", () => show(0, total));
  const slide = (by) => show(view.low + by * (view.high - view.low), view.high - view.low);
  byId("earlier").addEventListener("click", () => slide(-0.5));
  byId("later").addEventListener("click", () => slide(0.5));
  byId("goto").addEventListener("change", () => {
    const wanted = Number(byId("goto").value);
    choose(indexOf.has(wanted) ? indexOf.get(wanted) : numbers.findIndex((number) => number >= wanted));
  });
  byId("find").addEventListener("input", chooseRows);
  byId("rank").addEventListener("change", () => choose(view.step, Number(byId("rank").value)));
  window.addEventListener("resize", redraw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readColours();
    redraw();
  });
  function follow() {
    const given = new URLSearchParams(location.hash.slice(1));
    const step = Number(given.get("step")), rank = Number(given.get("rank") || 0);
    const near = indexOf.get(given.has("step") ? step : numbers[0]);
    choose(near === undefined ? 0 : near, ranks[rank] ? rank : 0, null);
    const shown = Number(given.get("shown"));
    if (shown) show(view.step + 0.5 - shown / 2, shown);
  }
  readColours();
  chooseRows();
  follow();
  draw();  // The first time at once: whoever prints or dumps the page has no frame to wait for.
  window.addEventListener("hashchange", follow);
})();
