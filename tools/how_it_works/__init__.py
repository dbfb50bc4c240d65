"""The pictures of docs/how_it_works.md, drawn from the state of a live scheduler and allocator."""
