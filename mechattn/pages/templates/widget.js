// A widget of a notebook: the page in a frame, and what is chosen there to Python and back.

function render({ model, el }) {
  const frame = document.createElement("iframe");
  let opened = false;
  frame.style.cssText = `width:100%;border:0;height:${model.get("height")}px`;
  const tell = () => frame.contentWindow?.postMessage({ select: model.get("selected") }, "*");
  const heard = ({ source, data }) => {
    if (source !== frame.contentWindow || !data?.chosen) return;
    if (!opened && model.get("selected")) tell();
    else model.send(data.chosen);
    opened = true;
  };
  addEventListener("message", heard);
  model.on("change:selected", tell);
  frame.srcdoc = model.get("source");
  el.append(frame);
  return () => {
    removeEventListener("message", heard);
    model.off("change:selected", tell);
  };
}
export default { render };
