"""One line per finished run with its headline figures: `python docs/examples/collect.py [REPORTS]`. Receipts are plain JSON; only the standard library."""

import json
import sys
from pathlib import Path

reports = Path(sys.argv[1] if len(sys.argv) > 1 else "reports")
for file in sorted(reports.glob("*/*/07_verdict.json")):
    verdict = json.loads(file.read_text(encoding="utf-8"))
    print(f"{verdict['box']}/{file.parent.name}: {'passed' if verdict['passed'] else 'FAILED'}: {verdict['verdict']}")
    for receipt in sorted(file.parent.glob("0*.json")):
        for figure in json.loads(receipt.read_text(encoding="utf-8"))["figures"].values():
            if figure["headline"]:
                print(f"    {receipt.name[:2]} {figure['label']}: {figure['value']} {figure['unit']} ({figure['evidence']})")
