"""What can be changed inside a forward pass: interventions."""

from mechattn.interventions.ablation import HeadAblation as HeadAblation
from mechattn.interventions.ablation import Knockout as Knockout
from mechattn.interventions.affine_attention import AffineAttention as AffineAttention
from mechattn.interventions.arm import ARM as ARM
from mechattn.interventions.transplant import KeysValues as KeysValues
from mechattn.interventions.transplant import Transplant as Transplant
