"""A wing: what a schedule plans and what runs have done, as tables, exports, a chart and a page. Without it everything else works."""
