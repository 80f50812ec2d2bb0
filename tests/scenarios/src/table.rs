//! Which scenario fails under which planted bug.
//!
//! [`table`] runs every scenario under every plant; [`Row::caught_by`] names those that
//! make it fail. A scenario that none of them breaks shows nothing.

use crate::{Manner, parse::Script, plants::PLANTS, run};

/// One scenario, and what breaks it.
#[derive(Clone, Debug)]
pub struct Row {
    /// The file's name.
    pub name: String,
    /// Names of the plants under which it fails.
    pub caught_by: Vec<&'static str>,
}

/// Runs every scenario under every plant, each in one order of steps first.
#[must_use]
pub fn table(scripts: &[Script]) -> Vec<Row> {
    scripts.iter().map(row).collect()
}

/// Whether a scenario that fails under this plant shows anything of flushes left out: one
/// flush too many breaks every bound that is tight.
#[must_use]
pub fn has_teeth(plant: &str) -> bool {
    plant != "flush-twice"
}

/// The first plant with [teeth](has_teeth), in the order of the list, that breaks a scenario.
#[must_use]
pub fn first(script: &Script) -> Option<&'static str> {
    let breaks = |once| {
        let mut plants = PLANTS.iter().filter(|plant| has_teeth(plant.name));
        plants.find(|plant| {
            run(script, Manner { plant: Some(plant), once, ..Manner::default() }).broken.is_some()
        })
    };
    breaks(true).or_else(|| breaks(false)).map(|plant| plant.name)
}

/// Runs one scenario under every plant.
#[must_use]
pub fn row(script: &Script) -> Row {
    let breaks = |once| {
        let plants = PLANTS.iter().filter(move |plant| {
            let once = once && !plant.turns;
            let manner = Manner { plant: Some(plant), once, ..Manner::default() };
            (once || !script.actors.is_empty()) && run(script, manner).broken.is_some()
        });
        plants.map(|plant| plant.name).collect::<Vec<_>>()
    };
    let mut caught_by = breaks(true);
    if caught_by.is_empty() {
        // Only an order other than the first shows it.
        caught_by = breaks(false);
    }
    let stem = script.file.file_stem().unwrap_or_default();
    Row { name: stem.to_string_lossy().into_owned(), caught_by }
}
