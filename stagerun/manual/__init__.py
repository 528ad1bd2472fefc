"""The pages of the manual with their pictures, shipped with the package, and `stagerun help`.

A new page is a Markdown file here and a row of `PAGES`. `scripts/dev pictures` draws the pictures.
"""
