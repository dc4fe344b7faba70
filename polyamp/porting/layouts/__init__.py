"""What a layer is, as data: its kind and canonical arrays, the form that leads there from a framework's own ones, the
inventory of a model, and what a backend's converter gives. Called by every other room of `polyamp.porting` and by
`backends/*/porting`; calls none of them."""
