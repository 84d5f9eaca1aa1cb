package main

import (
	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/loss"
)

// network builds the graph of the logits (batch × 10) of images (batch × 28 × 28 × 1): two
// convolutions with stride 2, and two dense layers.
func network(scope *model.Scope, x *graph.Node) *graph.Node {
	x = activation.Relu(convolve(scope.In("conv1"), x, 5, 2, 16))
	x = activation.Relu(convolve(scope.In("conv2"), x, 3, 2, 32))
	x = graph.Reshape(x, x.Shape().Dimensions[0], -1)
	x = activation.Relu(layers.Dense(scope.In("dense1"), x, true, 128))
	return layers.Dense(scope.In("dense2"), x, true, classes)
}

// convolve is a convolution with bias and without padding, computed as a matrix product of each
// position's kernel×kernel neighbourhood and the weights. With gomlx's pure Go backend this is
// about ten times as fast as layers.Convolution.
func convolve(scope *model.Scope, x *graph.Node, kernel, stride, channels int) *graph.Node {
	places := (x.Shape().Dimensions[1]-kernel)/stride + 1 // per row
	from := func(i int) graph.SliceAxisSpec {
		return graph.AxisRange(i, i+stride*(places-1)+1).Stride(stride)
	}
	var neighbours []*graph.Node
	for i := range kernel {
		for j := range kernel {
			neighbours = append(neighbours, graph.Slice(x, graph.AxisRange(), from(i), from(j), graph.AxisRange()))
		}
	}
	return layers.Dense(scope, graph.Concatenate(neighbours, -1), true, channels)
}

// crossEntropy builds the graph of the mean loss over a batch of images and labels (batch × 1).
func crossEntropy(scope *model.Scope, in []*graph.Node) *graph.Node {
	logits := network(scope, in[0])
	return graph.ReduceAllMean(loss.SparseCategoricalCrossEntropyLogits([]*graph.Node{in[1]}, []*graph.Node{logits}))
}

// inputShapes returns the shapes of a batch's images and labels.
func inputShapes(batch int) []shapes.Shape {
	return []shapes.Shape{shapes.Make(dtypes.Float32, batch, side, side, 1), shapes.Make(dtypes.Int32, batch, 1)}
}

// tensors returns the images with these indices, pixels 0..1, and their labels.
func (s *images) tensors(indices []int) (x, y *tensors.Tensor) {
	xs, ys := make([]float32, 0, len(indices)*pixels), make([]int32, 0, len(indices))
	for _, i := range indices {
		for _, p := range s.pixels[i*pixels : (i+1)*pixels] {
			xs = append(xs, float32(p)/255)
		}
		ys = append(ys, int32(s.labels[i]))
	}
	return tensors.FromFlatDataAndDimensions(xs, len(ys), side, side, 1), tensors.FromFlatDataAndDimensions(ys, len(ys), 1)
}

// accuracy returns the fraction of the images, 0..1, whose label has the highest logit.
func accuracy(backend compute.Backend, store *model.Store, set *images) (float64, error) {
	predict, err := model.NewExec(backend, store, network)
	if err != nil {
		return 0, err
	}
	defer predict.Finalize()
	right := 0
	for first := 0; first < set.len(); {
		var batch []int
		for ; first < set.len() && len(batch) < 500; first++ {
			batch = append(batch, first)
		}
		x, _ := set.tensors(batch)
		out, err := predict.Call(x)
		if err != nil {
			return 0, err
		}
		err = tensors.ConstFlatData(out[0], func(logits []float32) {
			for i, image := range batch {
				if best(logits[i*classes:(i+1)*classes]) == int(set.labels[image]) {
					right++
				}
			}
		})
		if err != nil {
			return 0, err
		}
	}
	return float64(right) / float64(set.len()), nil
}

// best returns the index of the largest logit.
func best(logits []float32) (at int) {
	for i, l := range logits {
		if l > logits[at] {
			at = i
		}
	}
	return at
}
