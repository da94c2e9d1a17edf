"""Reads a page of metrics with the official Python client's strict parser.

Arguments: a file with the page, and the model name that every worker's series carries.
"""

import sys

from prometheus_client.openmetrics.parser import text_string_to_metric_families

with open(sys.argv[1], encoding="utf-8", newline="") as page:
    families = list(text_string_to_metric_families(page.read()))
name = sys.argv[2]
samples = [sample for family in families for sample in family.samples]
# Workers name their model; the router serves them all.
workers = [s for s in samples if s.labels.get("role") in ("prefill", "decode")]
assert len(workers) > 100, len(workers)
for sample in workers:
    assert sample.labels["model_name"] == name, sample
others = {s.labels["model_name"] for s in samples if "model_name" in s.labels}
assert others == {name}, others
assert any(s.name == "baton_requests_total" for s in samples)
