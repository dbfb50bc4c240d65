// Helpers for elements, colours and canvases.

const GOLDEN_ANGLE = 137.508; // degrees between the hues of consecutive requests

/** Creates an element with these properties and children; strings become text, never markup. */
export function createElement(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

/** Colours from the style sheet, and a hue for each request. */
export class Palette {
  constructor() {
    const style = getComputedStyle(document.documentElement);
    const readVariable = (name) => style.getPropertyValue(`--${name}`).trim();
    const names = ["free", "cached", "ink", "ring", "table", "pin", "quiet",
      "take", "find", "share", "copy", "drop"];
    for (const name of names) this[name] = readVariable(name);
    this.requestColours = new Map();
    this.lightness = readVariable("cell-lightness");
    this.chroma = readVariable("cell-chroma");
  }

  requestColour(number, alpha = 1) {
    const key = `${number}/${alpha}`;
    let colour = this.requestColours.get(key);
    if (!colour) {
      const hue = (20 + number * GOLDEN_ANGLE) % 360;
      colour = `oklch(${this.lightness} ${this.chroma} ${hue.toFixed(1)} / ${alpha})`;
      this.requestColours.set(key, colour);
    }
    return colour;
  }

  /** Returns a small element in the request's colour. */
  swatch(number) {
    const swatch = createElement("i", { className: "swatch" });
    swatch.style.background = this.requestColour(number);
    return swatch;
  }
}

/** Sets a canvas's size in CSS pixels, at the screen's resolution, and returns its context. */
export function resizeCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
