"""The pages of the manual and their pictures, shipped with the package: `stagerun help PAGE` shows one.

A new page is a Markdown file here and a row of `PAGES`. `scripts/pictures` draws the pictures. Imports nothing of stagerun.
"""
