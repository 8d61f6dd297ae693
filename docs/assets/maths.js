// Formulas are set by the copy of KaTeX beside this file. Pages have them marked (.arithmatex), tutorials between $ signs.
for (const element of document.querySelectorAll(".arithmatex")) {
  const text = element.textContent.trim();
  katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: false });
}
for (const element of document.querySelectorAll(".jp-RenderedMarkdown")) {
  renderMathInElement(element, {
    delimiters: [
      { left: "$$", right: "$$", display: true },
      { left: "$", right: "$", display: false },
    ],
    throwOnError: false,
  });
}
