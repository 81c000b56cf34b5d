"""The hashes of the Keras functions at each seam, in the versions that have been checked (3.12 to 3.15).

``tools/keras_fingerprints.py`` prints those of the installed Keras, to compare with when a new version comes out.
"""

SUPPORTED = "keras>=3.12,<3.16"
KNOWN: dict[str, frozenset[str]] = {
    "keras.src.metrics.reduction_metrics:Mean.update_state": frozenset({"209682177983b7d6"}),
    "keras.src.losses.loss:scale_loss_for_distribution": frozenset({"fe7cf4a8687c8f8c"}),
    "keras.src.losses.loss:unscale_loss_for_distribution": frozenset({"967298cd5387c761"}),
    "keras.src.losses.loss:apply_mask": frozenset({"0781fb210642167a", "b6312c3c19633f43", "b7e5c242e30d4915"}),
    "keras.src.losses.loss:reduce_values": frozenset({"2f6cb4cc7b8e36ee"}),
    "keras.src.optimizers.base_optimizer:BaseOptimizer.apply": frozenset({"fa7a992c3dfcc349"}),
    "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.apply": frozenset({"f370d92679234f1a"}),
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._all_reduce_sum_gradients": frozenset(
        {"935ee2c9f12d56a4", "bb1ee993ba1389e9"}
    ),
    "keras.src.backend.tensorflow.optimizer:TFOptimizer.add_variable_from_reference": frozenset({"77a7652afbf6359e"}),
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._backend_update_step": frozenset({"9564c841b1cf2adb"}),
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._apply_weight_decay": frozenset({"9b333dc8d1f9500d"}),
    "keras.src.layers.rnn.rnn:RNN.call": frozenset({"c58663d0c1675188", "dfb0a9ecdb598bf8"}),
    "keras.src.trainers.trainer:Trainer._compute_loss": frozenset({"53b2882784d50fed"}),
    "keras.src.backend.common.variables:Variable.assign_add": frozenset({"c3ec4b2cb7a1bab9"}),
    "keras.src.backend.common.variables:Variable.assign_sub": frozenset({"13e1a307f9dd9b28"}),
    "keras.src.layers.normalization.batch_normalization:BatchNormalization._moments": frozenset(
        {"2a6e9e2e6a3ba8db", "8e242813442a5638"}
    ),
    "keras.src.random.seed_generator:SeedGenerator.next": frozenset({"3e0c1fccf4a9d816"}),
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer._make_function": frozenset({"1099094332b1eb32"}),
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.make_predict_function": frozenset({"c886e6ea148f89e9"}),
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer._maybe_symbolic_build": frozenset({"5a032dd564b2a065"}),
}
