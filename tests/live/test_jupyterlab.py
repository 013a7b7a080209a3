"""JupyterLab in a real browser: open a notebook, Run All, and get the receipt that papermill and the runner get.

By default the first two stations, which start no server; FIELDBOOK_LAB_STATIONS=01,...,07 runs as many as named.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request

import browser
import pytest

from fieldbook import paths, processes, receipts, server

pytestmark = [pytest.mark.live, pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium on this machine")]

# Backwards: 02 is opened first and has to get the receipt of 01 by itself.
STATIONS = [paths.station_name(n) for n in os.environ.get("FIELDBOOK_LAB_STATIONS", "02,01").split(",")]
# The tab is not 'current' for JupyterLab while no window has the focus.
PANEL = "[...(window.jupyterapp?.shell.widgets('main') ?? [])].find(widget => widget.context)"
SHOWN = """(() => {
  const panel = PANEL, cells = panel.content.model.cells
  const outputs = [...Array(cells.length).keys()].map(i => cells.get(i).toJSON()).filter(c => c.cell_type == 'code').flatMap(c => c.outputs)
  return JSON.stringify({errors: outputs.filter(o => o.output_type == 'error').map(o => o.evalue),
    stderr: outputs.filter(o => o.name == 'stderr').map(o => o.text),
    charts: outputs.filter(o => o.data && o.data['image/svg+xml']).length})
})()""".replace("PANEL", PANEL)


@pytest.fixture
def lab(tmp_path):
    """JupyterLab over a copy of the notebooks (it saves what it runs), with a reports folder of its own. Yields (address, reports)."""
    shutil.copytree(paths.root() / "notebooks", tmp_path / "notebooks")
    env = {**os.environ, "FIELDBOOK_ROOT": str(paths.root()), "FIELDBOOK_REPORTS": str(tmp_path / "reports"), "JUPYTER_CONFIG_DIR": str(tmp_path / "config")}
    env.pop("FIELDBOOK_OWNER", None)
    port = server.free_port(0)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += [f"--ServerApp.root_dir={tmp_path / 'notebooks'}"]
    command += ["--IdentityProvider.token=fieldbook", "--LabApp.expose_app_in_browser=True"]
    log = (tmp_path / "lab.log").open("w")
    process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    leader = processes.identify(process.pid)
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token=fieldbook", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", tmp_path / "reports"
    finally:
        processes.end_session(leader, 10)
        process.wait()
        for run_dir in (tmp_path / "reports").glob("*/*"):
            server.stop_all(run_dir)


@pytest.mark.timeout(1500)
def test_run_all_in_jupyterlab_gives_the_receipts_of_papermill_and_the_runner(quick, lab, tmp_path):
    # `quick` has the model prepared: the runner would fetch it before its first station, and the receipts tell whether its files are there.
    address, reports = lab
    for name in STATIONS:
        with browser.open_page(f"{address}/lab/tree/{name}.ipynb?token=fieldbook&reset") as page:
            page.wait(f"!!{PANEL}", 120)
            page.evaluate(f"{PANEL}.context.ready.then(() => true)")
            page.wait(f"{PANEL}.sessionContext.session?.kernel?.connectionStatus == 'connected'", 120)
            kernel = page.evaluate(f"{PANEL}.sessionContext.session.kernel.name")
            page.evaluate(f"window.jupyterapp.shell.activateById({PANEL}.id)")
            page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => true)")
            shown = json.loads(page.evaluate(SHOWN))
            if shown["charts"]:
                # JupyterLab shows the interactive form, not the picture.
                page.wait("document.querySelectorAll('.vega-embed').length", 30)
        assert kernel == "fieldbook"
        assert (shown["errors"], shown["stderr"]) == ([], [])
        assert receipts.read(reports / "cpu-smollm2" / "by-hand", name).passed

    params_file = paths.root() / "params" / "cpu-smollm2.yml"
    env = {**os.environ, "FIELDBOOK_REPORTS": str(tmp_path / "plain")}
    for name in sorted(STATIONS):
        command = [sys.executable, "-m", "papermill", str(paths.root() / "notebooks" / f"{name}.ipynb"), str(tmp_path / "out.ipynb"), "-f", str(params_file)]
        done = subprocess.run([*command, "--no-progress-bar"], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        # papermill logs 'Passed unknown parameter: ...' for a name the parameters cell does not have; ipykernel warns about plain TCP.
        assert "unknown parameter" not in done.stderr and "WARNING" not in done.stderr
        command = [sys.executable, "-m", "fieldbook", "run", str(params_file), "--only", name[:2], "--run-dir", str(tmp_path / "runner")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["receipts"]
        by_lab = receipts.read(reports / "cpu-smollm2" / "by-hand", name)
        by_papermill = receipts.read(tmp_path / "plain" / "cpu-smollm2" / "by-hand", name)
        by_runner = receipts.read(tmp_path / "runner", name)
        assert receipts.comparable(by_lab) == receipts.comparable(by_papermill) == receipts.comparable(by_runner)
