"""Parts of this room that only torch needs: its parallel engines, sharded tensors, and reports of failures."""
