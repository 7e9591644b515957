"""Open a page in a browser without a window, and read there what a script finds in it."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess

import pytest

FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
    --disable-background-networking --disable-component-update --window-size=800,900 --virtual-time-budget=3000 --dump-dom
    --disable-features=IsolateSandboxedIframes""".split()


def seen_in_browser(page, folder, probe, *options, around="content-visibility: auto"):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium to open the page in")
    digest = base64.b64encode(hashlib.sha256(probe.encode()).digest()).decode()
    allowed = page.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    probed = allowed.replace("<title>", f"<script>{probe}</script><title>", 1)
    # Notebooks show a page in a frame, so open it in a frame. A frame can also be narrower than a
    # window. The frame begins below the visible part, where the browser has not computed a layout.
    notebook = f"""<!DOCTYPE html><body><script>
        addEventListener("message", ({{ data }}) => document.body.setAttribute(typeof data === "number" ? "data-height" : "data-seen", data));
        function look(frame) {{
            frame.scrollIntoView();
            setTimeout(() => frame.contentWindow.postMessage("look", "*"), 500);
        }}
        </script><div style="height: 5000px"></div><div style="{around}">
        <iframe style="border: 0; height: 800px; width: 400px" sandbox="allow-scripts"
        onload="look(this)" srcdoc="{html.escape(probed)}"></iframe></div>"""
    opened = folder / "page.html"
    opened.write_text(notebook, encoding="utf-8")
    command = [chromium, *FLAGS, *options, f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run(
        [*command, opened.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    told = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert told, done.stdout[-2000:]
    return json.loads(html.unescape(told[1]))
