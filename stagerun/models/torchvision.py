"""`import stagerun.models.torchvision` makes a later `import torchvision` work with a torch build that its wheel was not made for."""

from stagerun.models.vision import torchvision_part

torchvision_part("torchvision")
