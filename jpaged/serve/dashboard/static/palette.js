// What all parts of the page share: elements, colours, and canvases as sharp as the screen.

const GOLDEN = 137.508; // degrees from one request's hue to the next

/** An element with these properties and children; strings among them are text, never markup. */
export function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

/** The colours of the style sheet, and one hue a request. */
export class Palette {
  constructor() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    const names = ["free", "cached", "ink", "ring", "table", "pin", "quiet",
      "take", "find", "share", "copy", "drop"];
    for (const name of names) this[name] = read(name);
    this.known = new Map();
    this.lightness = read("cell-lightness");
    this.chroma = read("cell-chroma");
  }

  of(number, alpha = 1) {
    const key = `${number}/${alpha}`;
    let colour = this.known.get(key);
    if (!colour) {
      const hue = (20 + number * GOLDEN) % 360;
      colour = `oklch(${this.lightness} ${this.chroma} ${hue.toFixed(1)} / ${alpha})`;
      this.known.set(key, colour);
    }
    return colour;
  }

  /** A request's colour, to stand before its name. */
  swatch(number) {
    const swatch = make("i", { className: "swatch" });
    swatch.style.background = this.of(number);
    return swatch;
  }
}

/** A canvas's context, its pixels those of the screen. */
export function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
