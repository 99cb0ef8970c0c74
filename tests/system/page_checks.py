"""What must hold of the live page however it looks, as scripts that its browser runs."""

from typing import Any

import pytest
from browser import Page

from black_box import until

LOOKS = [
    pytest.param(width, dark, id=f"{width}-{'dark' if dark else 'light'}")
    for width in (1280, 400)
    for dark in (False, True)
]

TEXT = "document.body.innerText"
CONNECTION = "document.getElementById('connection').textContent"
CARDS = """Object.fromEntries([...document.querySelectorAll('#way article')].map(
  (card) => [card.querySelector('.name').textContent, card.innerText.replaceAll("\\u00a0", " ")]))"""
TOO_WIDE = """[...document.querySelectorAll('body *')].filter((element) =>
  element.getBoundingClientRect().right > innerWidth + 0.5
  || element.clientWidth && element.scrollWidth > element.clientWidth + 1 && element.tagName !== 'INPUT'
  ).map((element) => element.outerHTML)"""
UNNAMED = """[...document.querySelectorAll('[role=meter], [role=img]')].filter((element) =>
  !element.getAttribute('aria-label') || element.role === 'meter' && !element.getAttribute('aria-valuetext')
  ).length"""
FAINT = """(() => {
  const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const parts = (colour) => colour.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ground = (element) => {
    const found = parts(getComputedStyle(element).backgroundColor);
    return found.length < 4 || found[3] ? found : ground(element.parentElement);
  };
  const isText = (element) => [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  const shown = [...document.querySelectorAll('body *')].filter((e) => isText(e) && e.checkVisibility());
  return shown.filter((e) => {
    const [a, b] = [light(parts(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05) < 4.5;
  }).map((e) => e.outerHTML);
})()"""
"""Text below the contrast that WCAG asks for at level AA."""


def see(page: Page, script: str, what: str, *, within_seconds: float = 20.0) -> Any:
    """What the script gives, once it is not empty."""
    return until(
        lambda: page.ask(script), timeout_seconds=within_seconds, what=f"{what}; it says {page.ask(TEXT)}"
    )
