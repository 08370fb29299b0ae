// A tier's blocks on a canvas: one cell each, whose colour moves to what it should be.
import { css, mix, named, ofRequest, ofShared } from "./colours.js";

const LARGEST = 15; // pixels of a cell with the gap behind it
const SMALLEST = 4;
const EASE = 0.22; // of the way in each frame
const CLOSE = 1.5; // near enough, of 255
const FEWEST = 128; // cells that are shown, however few are used

const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class BlockMap {
  /** `height` is what the picture should not exceed, if its cells stay large enough to see. */
  constructor(canvas, height) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.height = height;
    this.picture = null;
    this.zoomed = true; // on the cells up to the last that is not free, where all would be small
    this.cells = 0; // that are shown
    this.lit = null; // the id of a request whose blocks stand out
    this.shown = new Float32Array(0); // three numbers a cell
    this.wanted = new Float32Array(0);
    this.moving = new Set();
    this.frame = 0;
    new ResizeObserver(() => this.#layOut()).observe(canvas);
  }

  show(picture) {
    this.picture = picture;
    if (this.cells === this.#cellsToShow()) this.#aim();
    else this.#layOut();
  }

  zoom(zoomed) {
    this.zoomed = zoomed;
    if (this.picture) this.#layOut();
  }

  /** Whether there is anything to zoom into. */
  get isLarge() {
    return this.picture !== null && this.#size(this.picture.cells) < LARGEST && this.#used() < this.picture.cells;
  }

  #cellsToShow() {
    return this.zoomed && this.isLarge ? this.#used() : this.picture.cells;
  }

  /** As many cells as reach to the last one in use, in steps: the picture must not change its size all the time. */
  #used() {
    const { cells } = this.picture;
    let last = cells - 1;
    while (last > 0 && this.picture.isFree(last)) last -= 1;
    return Math.min(cells, Math.max(FEWEST, 2 ** Math.ceil(Math.log2(last + 1))));
  }

  #size(cells) {
    const width = this.canvas.clientWidth;
    let size = LARGEST;
    while (size > SMALLEST && Math.ceil(cells / Math.floor(width / size)) * size > this.height) size -= 1;
    return size;
  }

  light(request) {
    if (request === this.lit) return;
    this.lit = request;
    if (this.wanted.length) this.#aim();
  }

  /** Colours have changed all over. */
  repaint() {
    if (this.picture) this.#layOut();
  }

  cellAt(x, y) {
    const cell = Math.floor(y / this.size) * this.columns + Math.floor(x / this.size);
    const inside = x >= 0 && x < this.columns * this.size && y >= 0;
    return inside && cell < this.cells ? cell : null;
  }

  box(cell) {
    const column = cell % this.columns;
    return { x: column * this.size, y: ((cell - column) / this.columns) * this.size, size: this.size - this.gap };
  }

  #layOut() {
    const width = this.canvas.clientWidth;
    if (!this.picture || !width) return;
    const cells = this.#cellsToShow();
    const size = this.#size(cells);
    this.cells = cells;
    this.size = size;
    this.gap = size > 8 ? 2 : 1;
    this.columns = Math.max(1, Math.floor(width / size));
    Object.assign(this.canvas.dataset, { columns: this.columns, size, cells }); // where a cell is
    const rows = Math.ceil(cells / this.columns);
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(rows * size * scale);
    this.canvas.style.height = `${rows * size}px`;
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.wanted = new Float32Array(cells * 3);
    this.#colour();
    this.shown = this.wanted.slice();
    for (let cell = 0; cell < cells; cell += 1) this.#paint(cell);
    this.moving.clear();
  }

  /** Find each cell's colour, and move those that have another. */
  #aim() {
    this.#colour();
    const { wanted, shown } = this;
    for (let cell = 0; cell < this.cells; cell += 1) {
      const at = cell * 3;
      if (wanted[at] !== shown[at] || wanted[at + 1] !== shown[at + 1] || wanted[at + 2] !== shown[at + 2]) {
        this.moving.add(cell);
      }
    }
    if (this.moving.size && !this.frame) this.frame = requestAnimationFrame(() => this.#move());
  }

  #colour() {
    const { picture, wanted } = this;
    const base = { free: named("free"), cached: named("cached"), used: named("used"), sheet: named("sheet") };
    const known = new Map();
    for (let cell = 0; cell < this.cells; cell += 1) {
      const owner = picture.owner(cell);
      const key = `${picture.holders[cell]} ${owner?.number ?? ""}`;
      let colour = known.get(key);
      if (!colour) known.set(key, (colour = this.#colourOf(picture.holders[cell], owner, base)));
      if (picture.inUse) colour = this.#diluted(cell, colour, base);
      if (this.lit !== null && owner?.request !== this.lit) colour = mix(colour, base.sheet, 0.72);
      wanted.set(colour, cell * 3);
    }
  }

  #colourOf(holders, owner, base) {
    if (holders === 0) return base.free;
    if (holders === 1) return base.cached;
    if (holders > 2) return ofShared(holders - 1);
    return owner ? ofRequest(owner.number) : base.used;
  }

  /** A cell that is many blocks has as much colour as blocks that are held. */
  #diluted(cell, colour, base) {
    const ground = mix(base.free, base.cached, this.picture.cached[cell] / 255);
    const share = this.picture.inUse[cell] / 255;
    return share ? mix(ground, colour, 0.25 + 0.75 * share) : ground;
  }

  #move() {
    const { wanted, shown } = this;
    const ease = calm.matches ? 1 : EASE;
    for (const cell of this.moving) {
      let far = 0;
      for (let at = cell * 3; at < cell * 3 + 3; at += 1) {
        const left = wanted[at] - shown[at];
        far = Math.max(far, Math.abs(left));
        shown[at] += left * ease;
      }
      if (far < CLOSE) {
        shown.set(wanted.subarray(cell * 3, cell * 3 + 3), cell * 3);
        this.moving.delete(cell);
      }
      this.#paint(cell);
    }
    this.frame = this.moving.size ? requestAnimationFrame(() => this.#move()) : 0;
  }

  #paint(cell) {
    const { context, shown } = this;
    const { x, y, size } = this.box(cell);
    const at = cell * 3;
    const colour = css([shown[at], shown[at + 1], shown[at + 2]]);
    context.clearRect(x, y, size, size);
    context.beginPath();
    if (this.picture.isFree(cell)) {
      // Only its outline, so that it is not taken for a block that holds something.
      context.strokeStyle = colour;
      context.roundRect(x + 0.5, y + 0.5, size - 1, size - 1, size / 4);
      context.stroke();
      return;
    }
    context.fillStyle = colour;
    context.roundRect(x, y, size, size, size < 6 ? 0 : size / 4);
    context.fill();
  }
}
