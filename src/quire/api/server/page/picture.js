// The server's picture of a tier, unpacked: for each cell how many hold it, and who comes first.

export class Picture {
  constructor(tier) {
    const bytes = Uint8Array.from(atob(tier.picture), (char) => char.charCodeAt(0));
    const plane = (i) => bytes.subarray(i * tier.cells, (i + 1) * tier.cells);
    this.cells = tier.cells;
    this.perCell = tier.blocks_per_cell;
    this.owners = tier.owners ?? [];
    this.holders = plane(0); // 0 free, 1 cached, 2 held by one, 3 by two, …
    const own = tier.owners !== undefined;
    this.low = own ? plane(1) : null;
    this.high = own ? plane(2) : null;
    const shares = own ? 3 : 1;
    this.inUse = this.perCell > 1 ? plane(shares) : null;
    this.cached = this.perCell > 1 ? plane(shares + 1) : null;
  }

  /** The request that a cell's colour stands for; null if no request holds it. */
  owner(cell) {
    if (!this.low) return null;
    const place = this.low[cell] + 256 * this.high[cell];
    return place ? this.owners[place - 1] : null;
  }

  /** Whether nothing is in it; of a cell that is many blocks, in any of them. */
  isFree(cell) {
    return this.holders[cell] === 0 && !this.inUse?.[cell] && !this.cached?.[cell];
  }

  state(cell) {
    const held = this.holders[cell];
    if (held === 0) return "free";
    if (held === 1) return "cached";
    return held === 2 ? "in use" : `shared by ${held - 1}`;
  }
}
