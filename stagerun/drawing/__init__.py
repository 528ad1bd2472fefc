"""Pictures of schedules, as SVG, PNG, HTML or text, and what other pictures share with them: colours, the page, saving."""
