"""Any analysis of many examples, in parts, on any executor.

Read `over` first, which contains `over_examples`, then `division` (divides pairs, texts and
arguments) and `passes` (runs an analysis on all parts). Then read what these use: `jobs` (runs one
part; `interp.store.tasks` runs parts on an executor), `folder` with `fingerprints` (finished
parts), `joining` (joins the results) and `decisions` (analyses that need several passes).
"""
