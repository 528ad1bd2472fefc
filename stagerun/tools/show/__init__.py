"""`stagerun show NET`: a net prototxt of Caffe's as a table of its layers (`command`) and as a drawing (`draw`)."""
