"""The progress of one of many trainings: a bar and a curve while it runs, one line when it has
ended.

A stored curve takes as many bytes as a page of text. The control trainings of a notebook are
compared in a table, so their curves are not kept. For the training that the notebook is about, use
`show.Training`.

Footgun: make a new `Line` per training. One that is used again goes on in the place of the first.
"""

from nbworkbook import show


class Line(show.Progress):
    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        if self.ended:
            return {"text/plain": str(self)}
        return super()._repr_mimebundle_()
