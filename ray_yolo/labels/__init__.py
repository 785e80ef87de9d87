"""What the files of a data set say: its description, its labels in each format, and remarks on both.

The room imports neither torch nor Ray, and opens no image. Other rooms use the names below; `data/`, which adds the
images, is built on the modules.

| module | subject |
|---|---|
| `description`, `dataset_hints` | the YAML file; what was meant instead of it |
| `files`, `label_files`, `other_files` | pictures and lists; the label files of each image; files that no image uses |
| `yolo_txt`, `voc`, `coco` | the formats: from bytes, the image's size and the class names to rows and remarks |
| `rows`, `values` | a row, and the labels of an image; numbers, ids and flags as tools write them |
| `rules`, `remarks` | what each remark leads to; what follows from their counts |
| `class_files`, `exports`, `notes` | lists of class names; files of tools that are not read; lines about files |
| `twins`, `versions` | pictures in both splits; differences between two versions of a data set |
"""

from ray_yolo.labels import versions
from ray_yolo.labels.description import DatasetDescription
from ray_yolo.labels.label_files import LabelSources
from ray_yolo.labels.notes import file_lines
from ray_yolo.labels.rows import LabelOptions
from ray_yolo.labels.yolo_txt import shares_of

__all__ = ["DatasetDescription", "LabelOptions", "LabelSources", "file_lines", "shares_of", "versions"]
