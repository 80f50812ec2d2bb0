//! Properties of shadow tables: any script, any room, judged after each step.
//!
//! The reference is what the guest's own tables and its physical map say; the model
//! judges what its caches still hold. A failing script is shrunk.

use host::nested::{NestedSetup, NestedWorld, Step, Storage, Walks};
use hwmodel::Policy;
use proptest::prelude::*;
use stage2::format::{ept::Ept, npt::Npt};

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_script_reaches_what_neither_table_allows_or_leaves_it_cached(
        steps in prop::collection::vec(any::<[u8; 4]>().prop_map(Step::new), 1..120),
        shadows in 1..4usize,
        records in prop_oneof![0..6usize, Just(64)],
        policy in prop_oneof![Just(Policy::Greedy), any::<u64>().prop_map(Policy::Random)],
    ) {
        let setup = NestedSetup { shadows, records, policy, lie: None };
        run::<Ept>(setup, &steps)?;
        run::<Npt>(setup, &steps)?;
    }
}

fn run<F: Walks>(setup: NestedSetup, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut storage = Storage::new(setup);
    let world = NestedWorld::<F>::new(setup, &mut storage);
    world.populate();
    for step in steps {
        world.run(*step);
        let wrong = world.verdict();
        prop_assert!(wrong.is_empty(), "after {:?}: {:#?}", step, wrong);
    }
    world.finish();
    prop_assert_eq!(world.verdict(), Vec::<String>::new());
    Ok(())
}
