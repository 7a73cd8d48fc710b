/* A page that was opened as a file cannot start a Worker: run the search in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      const script = document.createElement("script");
      script.src = new URL(url, location.href);
      this.frame.srcdoc =
        `<script>postMessage = (data) => parent.postMessage(data, "*")</script>${script.outerHTML}`;
      this.loaded = new Promise((resolve) => this.frame.addEventListener("load", resolve));
      document.body.append(this.frame);
      addEventListener("message", ({ source, data }) => {
        if (source === this.frame.contentWindow) {
          this.dispatchEvent(new MessageEvent("message", { data }));
        }
      });
    }
    async postMessage(data) {
      await this.loaded;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
