"""Pictures as SVG, PNG, HTML or text: of schedules (`picture`), and what other pictures share: colours, scales, the page, saving.

In the trunk, since `plan`, `diff`, `report` and `bench` all draw. matplotlib is imported when a file is drawn.
"""
