// Several replicas behind one address: how each is, and which one the page looks at.
import { $, count, make, plural } from "./dom.js";
import { get } from "./api.js";

const STATES = { up: "up", starting: "starting", draining: "ends soon", down: "down" };

export class Replicas {
  /** `onChoose` is called when another one is looked at. */
  constructor(onChoose) {
    this.chosen = "0";
    this.wasAsked = false; // whether the user chose it
    this.onChoose = onChoose;
    this.rows = new Map();
  }

  /** A question to the one that is looked at. */
  ask(path) {
    return get(`${path}${path.includes("?") ? "&" : "?"}replica=${this.chosen}`);
  }

  show(told) {
    $("replicas").hidden = told.length === 0;
    for (const replica of told) {
      if (!this.rows.has(replica.name)) {
        const row = new Row(replica.name, replica.name === this.chosen, () => {
          this.wasAsked = true;
          this.#choose(replica.name);
        });
        this.rows.set(replica.name, row);
        $("replicas").append(row.element);
      }
      this.rows.get(replica.name).show(replica);
    }
    if (!this.wasAsked) this.#lookAtOneThatIsUp(told);
  }

  #lookAtOneThatIsUp(told) {
    const up = told.filter((replica) => replica.state === "up");
    if (!up.length || up.some((replica) => replica.name === this.chosen)) return;
    this.rows.get(up[0].name).input.checked = true;
    this.#choose(up[0].name);
  }

  #choose(name) {
    if (name === this.chosen) return;
    this.chosen = name;
    this.onChoose();
  }
}

class Row {
  constructor(name, isChosen, onChoose) {
    this.input = make("input", { type: "radio", name: "replica", value: name, checked: isChosen, onchange: onChoose });
    this.role = make("span", { class: "role" });
    this.state = make("span", { class: "state" });
    this.facts = make("span", { class: "facts" });
    this.pool = make("span", { class: "pool", role: "img" });
    const title = make("b", { text: `Replica ${name}` });
    this.element = make("label", { class: "replica" }, this.input, title, this.role, this.state, this.facts, this.pool);
  }

  show({ state, role, open, waiting, hit_rate: hitRate, blocks }) {
    this.element.dataset.state = state;
    this.role.textContent = role === "both" ? "" : role;
    this.state.textContent = STATES[state] ?? state;
    const facts = [plural(open, "request")];
    if (waiting) facts.push(`${count(waiting)} waiting`);
    if (hitRate !== undefined) facts.push(`${Math.round(hitRate * 100)} % found`);
    this.facts.textContent = state === "up" || state === "draining" ? facts.join(" · ") : "";
    this.#fill(blocks ?? { total: 1, cached: 0, in_use: 0, free: 1 });
  }

  #fill({ total, cached, in_use: inUse, free }) {
    const says = `${count(inUse)} blocks in use, ${count(cached)} cached, ${count(free)} free`;
    this.pool.setAttribute("aria-label", says);
    this.pool.title = says;
    const parts = [["in-use", inUse], ["cached", cached]].map(([kind, part]) => {
      const piece = make("i", { class: kind });
      piece.style.width = `${(part / total) * 100}%`;
      return piece;
    });
    this.pool.replaceChildren(...parts);
  }
}
