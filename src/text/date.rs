//! `strftime`, as far as chat templates use it (`strftime_now`).

const DAYS: [&str; 7] =
    ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A moment in UTC by a `strftime` format; the error names a conversion we do not know.
///
/// transformers uses the server's local time; UTC is what makes a prompt the same everywhere.
pub(super) fn strftime(format: &str, unix_seconds: u64) -> Result<String, String> {
    let (days, second_of_day) = (unix_seconds / 86_400, unix_seconds % 86_400);
    let (year, month, day) = civil_date(days);
    let (hour, minute, second) =
        (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    let hour_12 = (hour + 11) % 12 + 1;
    let day_name = DAYS[(days % 7) as usize];
    let month_name = MONTHS[(month - 1) as usize];
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(char) = chars.next() {
        if char != '%' {
            text.push(char);
            continue;
        }
        let conversion = chars.next();
        text += &match conversion {
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('d') => format!("{day:02}"),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('H') => format!("{hour:02}"),
            Some('I') => format!("{hour_12:02}"),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('M') => format!("{minute:02}"),
            Some('S') => format!("{second:02}"),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('%') => "%".to_owned(),
            Some(other) => return Err(format!("strftime: %{other} is not supported")),
            None => return Err("strftime: the format ends in %".to_owned()),
        };
    }
    Ok(text)
}

/// Year, month and day of a day number since 1970-01-01. Years are counted from March, so that
/// the leap day is a year's last, and in eras of 400 years, which all have 146,097 days.
fn civil_date(days_since_1970: u64) -> (u64, u64, u64) {
    const DAYS_FROM_MARCH_OF_YEAR_0: u64 = 719_468;
    let days = days_since_1970 + DAYS_FROM_MARCH_OF_YEAR_0;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_equal_those_of_python() {
        // From `datetime.fromtimestamp(seconds, timezone.utc).strftime(FORMAT)`.
        const FORMAT: &str = "%Y-%m-%d %H:%M:%S|%a %d %b %y|%A %B|%I %p|%F %T|100%%";
        for (seconds, expected) in [
            (
                0,
                "1970-01-01 00:00:00|Thu 01 Jan 70|Thursday January|12 AM|1970-01-01 00:00:00|100%",
            ),
            (
                951_782_400,
                "2000-02-29 00:00:00|Tue 29 Feb 00|Tuesday February|12 AM|2000-02-29 00:00:00|100%",
            ),
            (
                1_709_251_199,
                "2024-02-29 23:59:59|Thu 29 Feb 24|Thursday February|11 PM|\
                 2024-02-29 23:59:59|100%",
            ),
            (
                1_798_761_600,
                "2027-01-01 00:00:00|Fri 01 Jan 27|Friday January|12 AM|2027-01-01 00:00:00|100%",
            ),
            (
                4_107_542_400,
                "2100-03-01 00:00:00|Mon 01 Mar 00|Monday March|12 AM|2100-03-01 00:00:00|100%",
            ),
        ] {
            assert_eq!(strftime(FORMAT, seconds).expect("supported"), expected);
        }
    }

    #[test]
    fn unknown_conversions_are_named() {
        assert_eq!(strftime("%d %Q", 0).unwrap_err(), "strftime: %Q is not supported");
        assert_eq!(strftime("50%", 0).unwrap_err(), "strftime: the format ends in %");
    }
}
