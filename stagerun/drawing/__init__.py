"""Pictures as SVG: of schedules (`picture`), and what all pictures share: colours, scales, elements, files."""
