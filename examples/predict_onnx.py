"""Predict the rows of a table with an exported model.onnx, without fedhet (docs/guide.md)."""

import csv
import json
from datetime import UTC, datetime

import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
card = json.loads(session.get_modelmeta().custom_metadata_map["card"])
table = card["input"]


def value(column, text):
    if text in (*table["missing"], *column["missing"]):
        return np.nan
    if column["type"] == "date":
        form = column["format"]
        moment = datetime.strptime(text, form) if form else datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() / 86400
    if column["type"] == "number":
        text = text.removeprefix(column["unit"]).removesuffix(column["unit"]).strip()
        return float(text.replace(column["thousands"], "").replace(column["decimal"], "."))
    if text in column["values"]:
        return column["values"].index(text)
    print(f"{column['name']}: unknown category {text!r}")
    return -1


with open("new.csv", newline="") as file:
    rows = list(csv.DictReader(file))
x = np.array([[value(c, row[c["name"]].strip()) for c in table["columns"]] for row in rows])
(probabilities,) = session.run(None, {"x": x})
print([card["classes"][k] for k in probabilities.argmax(1)])
