"""The learning rates at which the loss of a run falls.

trial: a short run whose learning rate grows, without anything that is kept.
proposal: which rates the losses of a trial propose.
page: the page with the curve.
command: what `meshtrain learning-rate` does.
"""
