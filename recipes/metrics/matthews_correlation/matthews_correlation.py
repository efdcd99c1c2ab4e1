"""Matthews' correlation of any number of classes, for `evaluate.load` of this folder: without a network, without scikit-learn."""

# One import a line: evaluate reads them with a parser of its own.
import datasets
import evaluate
import numpy as np


class MatthewsCorrelation(evaluate.Metric):
    """R_K of Gorodkin (Computational Biology and Chemistry 28, 2004), which for two classes is Matthews' coefficient."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="Matthews' correlation, from -1 to 1; 0 is chance.", citation="", features=features)

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        """(c s - p·t) / sqrt((s² - p·p) (s² - t·t)): c of s samples right, p and t how often each class is predicted and true.
        0 where only one class is predicted, or true."""
        predicted, true = np.asarray(predictions), np.asarray(references)
        classes = 1 + max(predicted.max(), true.max())
        p, t = (np.bincount(values, minlength=classes).astype(float) for values in (predicted, true))
        s, c = float(len(true)), float(np.sum(predicted == true))
        scale = np.sqrt((s * s - p @ p) * (s * s - t @ t))
        return {"matthews_correlation": float((c * s - p @ t) / scale) if scale else 0.0}
