//! Hardware and models by the names that people give them, and the profile of this machine.

use std::env;
use std::io;
use std::path::PathBuf;

use kernels::Isa;

use super::CliError;
use super::bench::system::Machine;
use crate::config::EngineConfig;
use crate::models::{ModelError, ModelFiles};
use crate::simulate::{Calibration, HardwareProfile, ModelProfile, ProfileError};

/// The name of the profile that `calibrate` writes by default.
pub const THIS_MACHINE: &str = "this-machine";

/// The hardware of a preset, of a profile's file, or of this machine.
///
/// # Errors
/// None of them is there; a file that is no profile. What is wrong is named.
pub fn hardware(name: &str) -> Result<HardwareProfile, CliError> {
    let usage = |error: &dyn std::fmt::Display| CliError::Usage(format!("--hardware: {error}"));
    if name != THIS_MACHINE {
        return HardwareProfile::read(name).map_err(|error| usage(&error));
    }
    let path = default_path()?;
    HardwareProfile::read(&path.display().to_string()).map_err(|error| match error {
        ProfileError::Unknown { source, .. } if source.kind() == io::ErrorKind::NotFound => {
            usage(&format!(
                "this machine is not measured yet: run `deltapool calibrate`, which writes {}",
                path.display()
            ))
        }
        error => usage(&error),
    })
}

/// The name of the model in the binary.
pub const EMBEDDED: &str = "embedded";

/// The model of a preset, of the `config.json` in a folder or at a path, or the one in the binary.
///
/// # Errors
/// None of them is there; a config that is not understood. What is wrong is named.
pub fn model(name: &str) -> Result<ModelProfile, CliError> {
    #[cfg(feature = "embedded-model")]
    if name == EMBEDDED {
        let read = ModelProfile::from_config(crate::models::EMBEDDED_CONFIG);
        let named = read.map(|profile| ModelProfile { name: name.to_owned(), ..profile });
        return named.map_err(|error| CliError::Failed(error.to_string()));
    }
    ModelProfile::read(name).map_err(|error| CliError::Usage(format!("--model: {error}")))
}

/// Where the profile of this machine is kept.
///
/// # Errors
/// When the environment names no home.
pub fn default_path() -> Result<PathBuf, CliError> {
    path_of(env::var_os("XDG_CONFIG_HOME").map(PathBuf::from), env::home_dir()).ok_or_else(|| {
        let message = "neither XDG_CONFIG_HOME nor HOME says where the profile of this machine is \
                       kept; name a file";
        CliError::Usage(message.to_owned())
    })
}

/// A relative `XDG_CONFIG_HOME` counts as none, as its specification has it.
fn path_of(config: Option<PathBuf>, home: Option<PathBuf>) -> Option<PathBuf> {
    let home = home.filter(|home| home.is_absolute()).map(|home| home.join(".config"));
    let folder = config.filter(|path| path.is_absolute()).or(home)?;
    Some(folder.join("deltapool").join("hardware.json"))
}

/// Changes with a model's config, its precision and the bytes of its weights.
///
/// # Errors
/// Weights that cannot be read.
pub fn fingerprint(files: &ModelFiles) -> Result<String, ModelError> {
    let weights = files.weight_bytes()?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{:?} {weights:?}", files.spec).as_bytes());
    Ok(hasher.finalize().to_hex()[..16].to_owned())
}

/// The limits with the rates that this machine was measured with for this very model, where nobody
/// gave others: `--preempt auto` then measures nothing at the start. A profile of another machine
/// or model is not used; one that cannot be read is told on standard error, and not used.
pub fn calibrated(config: EngineConfig, files: &ModelFiles, isa: Isa) -> EngineConfig {
    let Ok(path) = default_path() else { return config };
    let profile = match HardwareProfile::read(&path.display().to_string()) {
        Ok(profile) => profile,
        Err(ProfileError::Unknown { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return config;
        }
        Err(error) => {
            eprintln!("note: {error}; it is not used");
            return config;
        }
    };
    let suits = profile.calibration.as_ref().is_some_and(|made| {
        let is_model = || fingerprint(files).is_ok_and(|print| print == made.fingerprint);
        is_this_machine(made, &Machine::this(isa), config.threads) && is_model()
    });
    if suits { with_rates(config, &profile) } else { config }
}

fn is_this_machine(made: &Calibration, machine: &Machine, threads: usize) -> bool {
    machine.processor.is_some()
        && made.processor == machine.processor
        && made.isa == machine.isa
        && made.threads == threads
}

/// The limits with the rates of a profile, but for those that were given.
fn with_rates(config: EngineConfig, profile: &HardwareProfile) -> EngineConfig {
    let Some(made) = &profile.calibration else { return config };
    EngineConfig {
        link_bytes_per_second: config.link_bytes_per_second.or(Some(profile.link())),
        prefill_tokens_per_second: config
            .prefill_tokens_per_second
            .or(Some(made.prefill_tokens_per_second)),
        pair_seconds: config.pair_seconds.or(Some(made.pair_seconds)),
        ..config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made() -> Calibration {
        Calibration {
            processor: Some("X".to_owned()),
            isa: "avx2".to_owned(),
            threads: 2,
            model: "m".to_owned(),
            fingerprint: "f".to_owned(),
            prefill_tokens_per_second: 500.0,
            pair_seconds: 1e-9,
        }
    }

    #[test]
    fn a_profile_is_of_one_processor_instruction_set_and_number_of_threads() {
        let machine = Machine { processor: Some("X".to_owned()), cores: 9, isa: "avx2" };
        assert!(is_this_machine(&made(), &machine, 2));
        assert!(!is_this_machine(&made(), &machine, 1));
        assert!(!is_this_machine(&made(), &Machine { isa: "avx512", ..machine.clone() }, 2));
        let other = Machine { processor: Some("Y".to_owned()), ..machine.clone() };
        assert!(!is_this_machine(&made(), &other, 2));
        let nameless = Machine { processor: None, ..machine };
        let of_nameless = Calibration { processor: None, ..made() };
        assert!(!is_this_machine(&of_nameless, &nameless, 2));
    }

    #[test]
    fn what_was_given_wins_over_what_was_measured() {
        let preset = HardwareProfile::preset("h100").expect("a preset");
        let profile = HardwareProfile {
            link_out: 10e9,
            link_in: 30e9,
            calibration: Some(made()),
            ..preset.clone()
        };
        let rates = |config: EngineConfig| {
            let config = with_rates(config, &profile);
            (config.link_bytes_per_second, config.prefill_tokens_per_second, config.pair_seconds)
        };
        let none = EngineConfig::default();
        assert_eq!(rates(none), (Some(15e9), Some(500.0), Some(1e-9)));
        let given = EngineConfig { link_bytes_per_second: Some(1.0), ..none };
        assert_eq!(rates(given), (Some(1.0), Some(500.0), Some(1e-9)));
        let given = EngineConfig { prefill_tokens_per_second: Some(2.0), ..none };
        assert_eq!(rates(given), (Some(15e9), Some(2.0), Some(1e-9)));
        assert_eq!(with_rates(none, &preset), none);
    }

    #[test]
    fn the_profile_is_kept_where_configuration_is() {
        let path = |config: Option<&str>, home: Option<&str>| {
            path_of(config.map(PathBuf::from), home.map(PathBuf::from))
        };
        let told = Some(PathBuf::from("/c/deltapool/hardware.json"));
        assert_eq!(path(Some("/c"), Some("/h")), told);
        let at_home = Some(PathBuf::from("/h/.config/deltapool/hardware.json"));
        assert_eq!(path(Some("c"), Some("/h")), at_home);
        assert_eq!(path(None, Some("/h")), at_home);
        assert_eq!(path(None, None), None);
    }
}
