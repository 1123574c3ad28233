from tests.rollout import test_engine as e
from tests.training import test_gradients as g
from tests import tiny
from tests.distributed import LAYOUTS
def test_measure(ranks, checkpoint, prompts, reference):
    out=[]
    for layout in LAYOUTS:
        for name,mode in e.MODES.items():
            a=ranks.run(e._sample_and_score, checkpoint, list(prompts.values()), layout, mode, **layout.job)[0]
            et=max(e.largest(x-t) for grp in a['groups'] for _,x,t in grp)
            eh=max(e.largest(x-reference.log_probs(p,i)[0]) for p,grp in zip(prompts.values(),a['groups']) for i,x,t in grp)
            out.append(f"{layout} {name} engine-trainer {et:.2e} engine-hf {eh:.2e}")
    seqs=tiny.make_sequences(prompts, group=2)
    exp=g.reference_gradients(reference.model, reference, seqs)
    for layout in LAYOUTS:
        for rec in (False,True):
            a=ranks.run(g._gradients, checkpoint, seqs, sequence_parallel=layout.sequence_parallel, recompute=rec, **layout.job)
            out.append(f"{layout} recompute={rec} grads {max(g.worst(x,exp) for x in a)} of {len(exp)}")
    open('/tmp/measure.txt','w').write("\n".join(out))
