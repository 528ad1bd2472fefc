#!/bin/sh
set -e
CAFFE=./build/tools/caffe
DIR=models/branches
PREFIX="/tmp/wide"

# the trunk: 4 GPUs
$CAFFE train -solver $DIR/solver.prototxt -gpu 0,1,2,3 2>&1 | tee trunk.log
# after the night shift's reboot
$CAFFE train -solver $DIR/solver.prototxt -snapshot ${PREFIX}_iter_600.solverstate -gpu 0,1,2,3
# a second cycle
$CAFFE train -solver=$DIR/solver_cycle.prototxt \
  --weights=${PREFIX}_iter_1000.caffemodel -gpu 0,1,2,3
# collapses: off iteration 900 of the trunk, and off the end of the cycle
$CAFFE train --solver $DIR/solver_early.prototxt --weights ${PREFIX}_iter_900.caffemodel --gpu=0,1,2,3
$CAFFE train --solver $DIR/solver_collapse.prototxt --weights ${PREFIX}_iter_1000.caffemodel --gpu 0,1,2,3
$CAFFE train --solver $DIR/solver_collapse.prototxt --weights /tmp/wide_cycle_iter_500.caffemodel --gpu 0,1,2,3
$CAFFE test -model $DIR/net.prototxt -weights /tmp/wide_collapse_iter_120.caffemodel -iterations 50
