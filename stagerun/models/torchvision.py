"""`import stagerun.models.torchvision` makes `import torchvision` work after it, beside a torch build that its wheel was not made for."""

from stagerun.models.vision import torchvision_part

torchvision_part("torchvision")
