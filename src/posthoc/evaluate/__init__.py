"""How good predictions are: metrics, scores of a fitted method, comparisons of methods, plots and reports."""

from posthoc.evaluate.compare import Comparison, compare
from posthoc.evaluate.evaluate import Evaluation, evaluate, score
from posthoc.evaluate.scores import Scores

__all__ = ["Comparison", "Evaluation", "Scores", "compare", "evaluate", "score"]
