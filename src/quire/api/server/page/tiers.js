// The tiers, one below the other: counts, a map of the blocks, and what a block holds.
import { onChange } from "./colours.js";
import { $, count, isTouched, make, plural } from "./dom.js";
import { BlockMap } from "./map.js";
import { Picture } from "./picture.js";

const NAMES = { device: "Device", host: "Host memory", ssd: "SSD", remote: "Remote store" };
const HEIGHTS = { device: 230, host: 84, ssd: 84 };
const WAIT_MS = 130; // before a block is asked for: a pointer that passes by asks nothing

export class Tiers {
  /** `ask` asks the server. */
  constructor(ask) {
    this.ask = ask;
    this.views = new Map();
  }

  clear() {
    this.views.clear();
    $("tiers").replaceChildren();
  }

  show(blocks) {
    for (const [name, tier] of Object.entries(blocks.tiers)) {
      if (!this.views.has(name)) {
        const view = new TierView(name, this.ask);
        this.views.set(name, view);
        $("tiers").append(view.element);
      }
      this.views.get(name).show(tier, blocks.block_size);
    }
  }

  /** Let the blocks of one request stand out; null: of none. */
  light(request) {
    this.views.get("device")?.map.light(request);
  }
}

class TierView {
  constructor(name, ask) {
    this.name = name;
    this.ask = ask;
    this.counts = make("p", { class: "counts" });
    this.canvas = make("canvas", { tabindex: "0", role: "application", "aria-roledescription": "block map" });
    this.cursor = make("div", { class: "cursor", hidden: true });
    this.frame = make("div", { class: "map", hidden: true }, this.canvas, this.cursor);
    this.zoom = make("button", { type: "button", class: "quiet zoom", hidden: true });
    this.detail = make("div", { class: "detail", "aria-live": "polite", hidden: true });
    this.element = make(
      "article",
      { class: "tier", id: `tier-${name}`, "aria-label": NAMES[name] ?? name },
      make("h3", { text: NAMES[name] ?? name }),
      this.counts,
      this.zoom,
      this.frame,
      this.detail,
    );
    this.map = new BlockMap(this.canvas, HEIGHTS[name] ?? 110);
    this.cell = null;
    this.#listen();
    onChange(() => this.map.repaint());
  }

  #listen() {
    const { canvas } = this;
    this.zoom.addEventListener("click", () => {
      this.map.zoom(!this.map.zoomed);
      this.#point(null);
      this.#tellZoom();
    });
    canvas.addEventListener("pointermove", (event) => this.#point(this.map.cellAt(event.offsetX, event.offsetY)));
    canvas.addEventListener("pointerdown", (event) => this.#point(this.map.cellAt(event.offsetX, event.offsetY)));
    canvas.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && document.activeElement !== canvas) this.#point(null);
    });
    canvas.addEventListener("blur", () => this.#point(null));
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
  }

  #onKey(event) {
    const { columns, cells } = this.map;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
    const ends = { Home: 0, End: cells - 1 };
    if (event.key === "Escape") return this.#point(null);
    if (!(event.key in steps) && !(event.key in ends)) return undefined;
    event.preventDefault();
    const next = event.key in ends ? ends[event.key] : (this.cell ?? -steps[event.key]) + steps[event.key];
    return this.#point(Math.min(cells - 1, Math.max(0, next)));
  }

  show(tier, blockSize) {
    this.blockSize = blockSize;
    this.counts.replaceChildren(...this.#counted(tier));
    if (!tier.picture) return;
    this.frame.hidden = false;
    this.detail.hidden = this.name !== "device";
    this.map.show(new Picture(tier));
    if (this.name === "device" && !this.detail.hasChildNodes()) this.#rest();
    const { perCell } = this.map.picture;
    const each = perCell > 1 ? `; a cell is ${perCell} blocks` : "";
    this.canvas.setAttribute("aria-label", `${NAMES[this.name]}: ${this.counts.textContent}${each}. Arrow keys go from block to block.`);
    this.#tellZoom();
    if (this.cell !== null) this.#say(this.cell);
  }

  /** A map that shows only the blocks up to the last one in use says so, and can show them all. */
  #tellZoom() {
    const { cells, picture, isLarge, zoomed } = this.map;
    this.zoom.hidden = !isLarge || !cells; // none are shown where the map is hidden
    const hidden = (picture.cells - cells) * picture.perCell;
    this.zoom.textContent = zoomed ? `Show ${count(hidden)} more, all free` : "Zoom to what is used";
  }

  #counted(tier) {
    if (tier.total === undefined) return this.#remote(tier);
    const parts = [["free", tier.free], ["cached", tier.cached], ["in use", tier.in_use]];
    if (tier.shared !== undefined) parts.push(["shared", tier.shared]);
    const told = parts.flatMap(([name, value], i) => [i ? " · " : "", make("b", { text: count(value) }), ` ${name}`]);
    const passing = tier.capacity === undefined ? 0 : tier.total - tier.capacity;
    const room = passing ? ` (${count(passing)} to pass through)` : "";
    return [`${plural(tier.total, "block")}${room}: `, ...told];
  }

  #remote(tier) {
    const fine = tier.breaker === "closed";
    return [fine ? `${tier.address}, answers` : `${tier.address}, left alone: ${tier.last_error}`];
  }

  #point(cell) {
    if (cell === this.cell && cell !== null) return;
    clearTimeout(this.waiting);
    this.cell = cell;
    this.cursor.hidden = cell === null;
    if (cell === null) {
      this.#rest();
      return;
    }
    const { x, y, size } = this.map.box(cell);
    this.cursor.style.width = this.cursor.style.height = `${size + 4}px`;
    this.cursor.style.transform = `translate(${x - 2}px, ${y - 2}px)`;
    this.cursor.style.top = this.cursor.style.left = "0";
    this.#say(cell);
  }

  #rest() {
    this.told = null;
    if (this.name !== "device") this.detail.hidden = true;
    const how = isTouched.matches ? "Tap a block" : "Point at a block, or go to it with the arrow keys,";
    const hint = `${how} to see whose it is and what it holds.`;
    this.detail.replaceChildren(make("span", { class: "at-rest", text: hint }));
  }

  /** What the picture itself knows. */
  #say(cell) {
    const { picture } = this.map;
    this.detail.hidden = false;
    const first = cell * picture.perCell;
    const last = first + picture.perCell - 1;
    const where = picture.perCell > 1 ? `Blocks ${count(first)}–${count(last)}` : `Block ${count(first)}`;
    const owner = picture.owner(cell);
    const whose = owner?.request ? ` · request ${owner.request}` : "";
    const head = `${picture.state(cell)}${whose}`;
    if (this.told?.cell === cell && this.told.head === head) return;
    if (this.told?.cell === cell && this.name === "device") this.told.head = head; // asked again below
    else this.#tell(cell, head, where, head, "");
    if (this.name === "device") {
      clearTimeout(this.waiting);
      this.waiting = setTimeout(() => this.#ask(cell), WAIT_MS);
    }
  }

  #tell(cell, head, where, whose, words) {
    this.told = { cell, head };
    this.detail.replaceChildren(
      make("strong", { text: where }),
      make("span", { text: whose }),
      make("span", { class: "words", text: words }),
    );
  }

  async #ask(cell) {
    const { perCell } = this.map.picture;
    let found;
    try {
      found = await this.ask(`page/data/blocks/${cell * perCell}?count=${perCell}`);
    } catch {
      return; // a busy engine; the picture has said the most of it
    }
    if (this.cell !== cell) return;
    const who = found.requests.map((each) => this.#holder(each)).join(", ");
    const hidden = found.holders - found.requests.length;
    const others = hidden > 0 && who ? ` and ${hidden} more` : "";
    const state = found.holders > 1 ? `shared by ${found.holders}` : found.state;
    const words = found.text || (found.tokens ? plural(found.tokens, "token") : "");
    const whose = who ? `${state}: ${who}${others}` : state;
    this.#tell(cell, this.told?.head, `Block ${count(found.block)}`, whose, words);
  }

  #holder({ request, sample, place }) {
    const first = place * this.blockSize;
    const which = sample ? `, sample ${sample + 1}` : "";
    return `request ${request}${which} (tokens ${count(first)}–${count(first + this.blockSize - 1)})`;
  }
}
