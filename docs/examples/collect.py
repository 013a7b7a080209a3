"""One line per finished run: `python docs/examples/collect.py [REPORTS]`. Only the standard library; receipts are plain JSON."""

import json
import sys
from pathlib import Path

reports = Path(sys.argv[1] if len(sys.argv) > 1 else "reports")
for file in sorted(reports.glob("*/*/07_verdict.json")):
    verdict = json.loads(file.read_text(encoding="utf-8"))
    measured = json.loads(file.with_name("06_benchmarks.json").read_text(encoding="utf-8"))
    print(f"{verdict['box']}/{file.parent.name}: {'passed' if verdict['passed'] else 'FAILED'}: {verdict['verdict']}")
    for key, figure in measured["figures"].items():
        if figure["headline"]:
            print(f"    {figure['label']}: {figure['value']:,} {figure['unit']} ({figure['evidence']})")
