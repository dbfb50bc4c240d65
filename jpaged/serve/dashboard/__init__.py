"""The picture of the paged memory at `/`: sampled in the engine's process, drawn by the page."""
