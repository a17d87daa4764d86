// Runs the script of a run's page without a browser, and presses keys: node keys.mjs PAGE EVENTS
//
// PAGE is the file, EVENTS a JSON list: {"on": "lane 0" or "rows", "type": "keydown", "key": ...},
// or {"on": "side", "type": "click", "line": N}, of the panel's lines that take clicks.
// Prints a JSON list: what the page shows at first, and after each event. Of the document there is
// as much as the script asks for; what it draws on canvases goes nowhere.
import { readFileSync } from "node:fs";
import vm from "node:vm";

const [, , file, events] = process.argv;
const html = readFileSync(file, "utf8");
const data = html.match(/<script type="application\/json" id="run">(.*?)<\/script>/s)[1];
const script = html.match(/<script>(.*?)<\/script>/s)[1];
const ids = new Set([...html.matchAll(/\bid="([^"]+)"/g)].map((found) => found[1]));

class Node {
  constructor(tag) {
    Object.assign(this, { tag, text: "", children: [], attributes: {}, listeners: {}, dataset: {}, style: {} });
    Object.assign(this, { scrollTop: 0, clientWidth: 900, clientHeight: 300, value: "", parentElement: null });
    const names = new Set();
    this.classList = { toggle: (name, on) => (on ? names.add(name) : names.delete(name)), add: (n) => names.add(n) };
  }
  append(...added) {
    for (const each of added) {
      if (each instanceof Node) each.parentElement = this;
      this.children.push(each);
    }
  }
  set textContent(text) {
    this.children = [];
    this.text = String(text);
  }
  get textContent() {
    return this.text + this.children.map((each) => (each instanceof Node ? each.textContent : each)).join("");
  }
  setAttribute(name, value) {
    this.attributes[name] = String(value);
  }
  addEventListener(type, listener) {
    (this.listeners[type] ||= []).push(listener);
  }
  querySelector(tag) {
    return (this[`own ${tag}`] ||= new Node(tag));
  }
  getBoundingClientRect() {
    return { left: 0, top: 0, width: this.clientWidth, height: this.clientHeight };
  }
  getContext() {
    const pen = { measureText: (text) => ({ width: 6 * text.length }) };
    return new Proxy(pen, { get: (of, name) => of[name] ?? (() => undefined), set: () => true });
  }
  focus() {
    document.activeElement = this;
  }
  find(id) {
    if (this.id === id) return this;
    for (const each of this.children) {
      const found = each instanceof Node && each.find(id);
      if (found) return found;
    }
    return null;
  }
}

const byId = {};
for (const id of ids) {
  byId[id] = new Node("div");
  byId[id].parentElement = new Node("div");
}
byId.run.text = data;
const document = {
  documentElement: new Node("html"),
  activeElement: null,
  getElementById: (id) => byId[id] ?? null,
  createElement: (tag) => new Node(tag),
};
const opened = [];
const location = { hash: "", assign: (address) => opened.push(address) };
const window = new Node("window");
Object.assign(window, { devicePixelRatio: 1, matchMedia: () => new Node("media") });
const history = { replaceState: (state, title, address) => (location.hash = address) };
vm.runInNewContext(script, {
  document, window, location, history, URLSearchParams,
  getComputedStyle: () => ({ getPropertyValue: () => "#000" }),
  requestAnimationFrame: (draw) => draw(),
});

function shown() {
  const lanes = byId.lanes.children.map((lane) => lane.children.find((each) => each.tag === "canvas"));
  const link = byId.side.find("page");
  return {
    step: Number(document.documentElement.dataset.step),
    hash: location.hash,
    drawn: document.documentElement.dataset.drawn,
    title: byId.side.children[0].textContent,
    request: byId.rows.querySelector("canvas").attributes["aria-valuetext"],
    focus: lanes.indexOf(document.activeElement),
    side: byId.side.textContent,
    link: link ? link.href : null,
    command: byId.side.children.filter((each) => each.tag === "code").map((each) => each.textContent),
    opened: [...opened],
    said: lanes.map((canvas) => canvas.attributes["aria-valuetext"]),
  };
}

function clickable(node) {
  return node.listeners.click ? [node] : node.children.flatMap((each) => (each instanceof Node ? clickable(each) : []));
}

function targetOf(on, line) {
  if (on === "rows") return byId.rows.querySelector("canvas");
  if (on === "side") return clickable(byId.side).at(line);
  return byId.lanes.children[Number(on.split(" ")[1])].children.find((each) => each.tag === "canvas");
}

const told = [shown()];
for (const { on, type = "keydown", line, ...more } of JSON.parse(events)) {
  const target = targetOf(on, line);
  let prevented = false;
  for (const listener of target.listeners[type] ?? [])
    listener({ preventDefault: () => (prevented = true), clientX: 0, clientY: 0, ...more });
  told.push({ ...shown(), prevented });
}
process.stdout.write(JSON.stringify(told));
