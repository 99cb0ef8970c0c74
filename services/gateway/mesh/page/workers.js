// One letter and one colour for each worker, the same all over the page, kept while a worker restarts.

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
const NUM_COLOURS = 8; // as many as the style sheet has

const inOrder = new Intl.Collator("en", { numeric: true }).compare;

export class Workers {
  constructor() {
    this.names = [];
  }

  /** Know these names; who has a letter keeps it. */
  hear(names) {
    const fresh = [...new Set(names)].filter((name) => !this.names.includes(name));
    this.names.push(...fresh.sort(inOrder));
  }

  letter(name) {
    return LETTERS[this.names.indexOf(name) % LETTERS.length];
  }

  colour(name) {
    return `w${this.names.indexOf(name) % NUM_COLOURS}`;
  }
}
