def augment(image, rng):
    return image
